"""Generation: prompts in, samples out, each drawn from its own counted random stream."""

from loragate.generation.engine import Engine, OnProgress, Sample, SampleWriter, read_samples
from loragate.generation.sampling import SamplingConfig
from loragate.generation.sharded import ShardedEngine
from loragate.generation.transformers_engine import TransformersEngine
from loragate.generation.vllm_engine import VllmEngine

__all__ = [
    "Engine",
    "OnProgress",
    "Sample",
    "SampleWriter",
    "SamplingConfig",
    "ShardedEngine",
    "TransformersEngine",
    "VllmEngine",
    "read_samples",
]
