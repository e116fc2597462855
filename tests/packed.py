"""Weights stored as torchao stores them, without torchao."""

import torch


class Packed(torch.Tensor):
    """Integers and a scale that call themselves a float tensor and take part in products alone, as torchao's do."""

    @staticmethod
    def __new__(cls, integers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype)

    def __init__(self, integers, scale):
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self):
        return ["integers", "scale"], None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            x, weight, *bias = args
            return func(x, weight.integers * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].integers, args[0].scale)
        raise NotImplementedError(f"{func} of packed weights")


def packed(base, name="v_proj"):
    """The base with the linear layers of this name packed."""
    for path, module in base.named_modules():
        if path.endswith(name):
            integers = (module.weight.detach() * 300).round().to(torch.int8)
            module.weight = torch.nn.Parameter(Packed(integers, torch.tensor(1 / 300)), requires_grad=False)
    return base
