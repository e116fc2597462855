"""The synthetic world: everything a full run needs, without a download or a GPU.

One kind of problem (left-to-right arithmetic modulo ten), three skills that must not be forgotten, demonstrations, a
strict verifier, and a 157,504-parameter base model that ships with the package. How it was trained is in
`benchmarks/worlds`.

    vocabulary      the words by the role they play
    problems        problems and retention items in four disjoint splits; is this finished response right?
    demonstrations  the noisy rows to fine-tune on
    base            save and load the tiny base

This room knows torch and transformers; it knows nothing of adapters, gates or trainers.
"""
