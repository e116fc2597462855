from .folder_gates import (
    FolderGates as FolderGates,
    read_gates as read_gates,
    stamp as stamp,
    unreached_note as unreached_note,
)
from .loading import (
    GatedPeftModel as GatedPeftModel,
    base_config as base_config,
    base_weights as base_weights,
    generation_config as generation_config,
    open_base as open_base,
    refuse_gguf as refuse_gguf,
    torch_device as torch_device,
    Loaded as Loaded,
    explained as explained,
    load_gated as load_gated,
    open_model as open_model,
    open_tokenizer as open_tokenizer,
    open_weights as open_weights,
    open_without_weights as open_without_weights,
    load_adapter as load_adapter,
)
from .source import (
    LORA_RANKS as LORA_RANKS,
    Kind as Kind,
    ModelRef as ModelRef,
    ModelSource as ModelSource,
    is_adapter as is_adapter,
    is_gated as is_gated,
    plain_adapter as plain_adapter,
    read_adapter_config as read_adapter_config,
    require_here as require_here,
    resolve as resolve,
    parse_slot_override as parse_slot_override,
)
from .settings import Loading as Loading
