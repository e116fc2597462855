"""Choosing among candidates on held-out evidence, with the untouched adapter always among them.

Two ways in. `loragate calibrate` and `calibrate`:

transaction   checks what was given, takes the model, and writes what comes out; it calls
evidence      which questions there are for a choice, or why there are none (questions: read, held against the rows)
comparison    train a part, ask, train on, ask more, recommend, veto or confirm, record; it calls
recommend     what answers say of all settings, whom to ask next, and what to recommend
rulings       what scores rule out: a range not worth training on, a clear loss on the retention probe
forms         signs in the forms of answers: a model that gave some up, a probe that lacks kinds of questions
chosen        what came of it, in sentences

`loragate sweep`:

sweep         many ranges, objectives and seeds, in sequence or on Ray (on_ray)
outcome       its pick (best mean, ties to the adapter), its record, and its cells as rows of an evaluation

Both stand on:

candidate     a range and an objective to try, or what needs no training
settings      how candidates are asked
probe         questions with labels, or judged by the adapter's own majority, and what a model did on them
trial         one candidate: train, keep, ask; the only place that runs one
store         a study and the files of its trials; what is finished there is never run again
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
