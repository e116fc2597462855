"""Generation: prompts in, samples out, each drawn from its own counted random stream."""

from loragate.generation.engine import (
    Engine,
    OnProgress,
    Sample,
    SampleWriter,
    read_samples,
    tokenize_prompts,
)
from loragate.generation.sampling import SamplingConfig, SeededSampler, uniform
from loragate.generation.sharded import ShardedEngine
from loragate.generation.transformers_engine import TransformersEngine
from loragate.generation.vllm_engine import VllmEngine

__all__ = [
    "Engine",
    "OnProgress",
    "Sample",
    "SampleWriter",
    "SamplingConfig",
    "SeededSampler",
    "ShardedEngine",
    "TransformersEngine",
    "VllmEngine",
    "read_samples",
    "tokenize_prompts",
    "uniform",
]
