"""The check-up of a finished adapter (`loragate doctor`, `loragate.examine`): findings with remedies, measures, a verdict.

record        Examination: what is found, as doctor.json holds it
static        the files and the configuration against the base's, and each module's delta; no weights of the base
tokens        tokenizer, chat template and the end of an answer, against the base's
answers       answers of base and adapter to the same prompts: stopping, repetition, language, thinking, forgetting
effect        where and how far the adapter moves the predictions, module by module
learned       losses on the examples: is it the right base, the right strength, learnt or memorised
strength      target against retention over strengths, bands of layers, kinds of modules and gates
examination   examine(): the parts in their order, resumable
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
