"""A conformance check of any runtime that serves adapters: does it compute what transformers computes, whatever was asked before?

`served` is what every runtime is asked, `endpoint` and `llama_cpp` are the runtimes, `checks` judges, `run` is the command.
"""

from loragate.serving.verify.run import verify as verify
