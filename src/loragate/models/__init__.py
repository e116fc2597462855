"""From the text that names a model to a loaded model, in one way for every command and for `loragate.load_gated`.

    ref = ModelRef.parse("owner/name@v1@unit")     # name, revision, override; a folder that exists wins over a hub id
    place = resolve("gated", base="")              # ModelSource: kind ("base" | "adapter" | "gated"), folder, base, override;
                                                   # an adapter on the hub is downloaded and pinned, records are read once
    loaded = open_model(place, Loading(dtype="auto", device="auto", quantization="none", chat_template=""))
    loaded.model, loaded.tokenizer, loaded.model_source   # the same for base, adapter and gated, an override laid over λ
    open_tokenizer(place, how)                     # the tokenizer alone
    open_without_weights(place, how)               # tokenizer and configuration, for vLLM, which loads the weights itself
    open_base(place.base, how); load_adapter(base, place)  # in two steps, where a caller holds the base in memory

`place.record_name` is "owner/name@commit" of what came from the hub, for records. `folder_gates.py` reads gates and adapter
from files, as servers and `export.py` (gates folded into a plain adapter) need them; neither loads a model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
