"""Generation: prompts in, samples out, each drawn from its own counted random stream."""

from loragate.generation.engine import Engine, OnProgress, Sample, TransformersEngine
from loragate.generation.samples import SampleWriter, read_samples
from loragate.generation.sampling import SamplingConfig, SeededSampler, uniform

__all__ = [
    "Engine",
    "OnProgress",
    "Sample",
    "SampleWriter",
    "SamplingConfig",
    "SeededSampler",
    "TransformersEngine",
    "read_samples",
    "uniform",
]
