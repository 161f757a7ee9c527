"""Tensors as a shard stores them: names of dtypes, shapes, and which tensors cannot be stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedTensorMixin  # type: ignore[attr-defined]

from ._internal import CheckpointError

#: The name of each dtype in safetensors.
DTYPES: dict[torch.dtype, str] = {
    getattr(torch, dtype): name
    for dtype, name in {
        "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
        "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
        "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
        "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
    }.items()
    if hasattr(torch, dtype)
}  # fmt: skip
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
#: dtypes without a name in safetensors, stored as others with the same bytes: the name of those,
#: and the dimension that they add.
_AS_OTHER: dict[torch.dtype, tuple[str, list[int]]] = {
    getattr(torch, dtype): stored
    for dtype, stored in {"complex128": ("F64", [2]), "complex32": ("F16", [2]), "float4_e2m1fn_x2": ("U8", [])}.items()
    if hasattr(torch, dtype)
}
#: The dtypes of the two parts of a complex number.
_COMPLEX = {"complex128": "F64", "complex64": "F32", "complex32": "F16"}
_BY_TORCH_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in [*DTYPES, *_AS_OTHER]}

_KINDS = (Tensor, Parameter)
_PLAIN_DISPATCH = Tensor.__torch_dispatch__


def stored_as(tensor: Tensor, name: str) -> tuple[str, list[int]]:
    """Returns the name of the dtype and the shape under which a shard stores a tensor."""
    known = DTYPES.get(tensor.dtype)
    if known is not None:
        return known, list(tensor.shape)
    other = _AS_OTHER.get(tensor.dtype)
    if other is None:
        raise CheckpointError(f"{name} has dtype {tensor.dtype}, which cannot be saved; convert it first")
    return other[0], [*tensor.shape, *other[1]]


def real_dtype(tensor: Tensor) -> str | None:
    """Returns the name of a dtype that :func:`stored_as` stores as another one; ``None`` for all
    others."""
    return None if tensor.dtype in DTYPES else str(tensor.dtype).removeprefix("torch.")


def _is_stored_form(stored: str, shape: Sequence[int], dtype: str) -> bool:
    real = _BY_TORCH_NAME.get(dtype)
    if dtype in _COMPLEX:
        return stored == _COMPLEX[dtype] and list(shape[-1:]) == [2]
    other = None if real is None else _AS_OTHER.get(real)
    return real is not None and (other is None or stored == other[0])


def as_real_dtype(tensor: Tensor, dtype: str) -> Tensor:
    """Returns a stored tensor with its original dtype: the same memory.

    Raises:
        ValueError: when a tensor of that dtype is not stored like this.
    """
    if not _is_stored_form(DTYPES[tensor.dtype], tensor.shape, dtype):
        raise ValueError(f"{dtype} is not stored as {DTYPES[tensor.dtype]} {list(tensor.shape)}")
    if tensor.dtype.is_floating_point and dtype.startswith("complex"):
        return torch.view_as_complex(tensor)
    return tensor.view(_BY_TORCH_NAME[dtype])


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor (FSDP2, tensor parallel), the same memory; any
    other tensor itself."""
    part: Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part


def is_lazy(tensor: Any) -> bool:
    """Returns whether this is a parameter or buffer of a lazy module that has no shape yet."""
    return isinstance(tensor, UninitializedTensorMixin)


def _unstorable(tensor: Tensor) -> str | None:
    """Returns why a tensor has no dense storage, if it has none."""
    if is_lazy(tensor):
        return "is not initialized yet (lazy module): run one forward pass first"
    if type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH:
        kind = type(tensor)
        return (
            f"is a {kind.__module__}.{kind.__qualname__}, a tensor subclass without dense storage, which cannot be saved; "
            "convert it to a dense tensor"
        )
    if tensor.is_nested:
        return "is a nested tensor, which cannot be saved; save its values() and offsets(), or unbind() it"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}, which cannot be saved; save to_dense(), or its indices and values"
    if tensor.is_meta:
        return "is on the meta device and has no values; materialize it first"
    if tensor._is_zerotensor():
        return (
            "is a tensor of zeros without memory (of forward-mode differentiation), which cannot be saved; save it + 0"
        )
    if tensor.is_quantized:
        return "is a quantized tensor, which cannot be saved; save int_repr() with its scale and zero point"
    if tensor.dtype not in DTYPES and tensor.dtype not in _AS_OTHER:
        return f"has dtype {tensor.dtype}, which cannot be saved; convert it first"
    return None


def storable(tensor: Tensor, path: Callable[[], str]) -> Tensor:
    """Returns the values of a tensor as memory that can be copied: the tensor itself, or, for
    lazily conjugated and negated views, a copy.

    Raises:
        CheckpointError: naming ``path``, for tensors that cannot be restored exactly.
    """
    # This runs for every tensor at every step. Quantized tensors have dtypes of their own.
    if (
        type(tensor) in _KINDS
        and tensor.layout is torch.strided
        and tensor.dtype in DTYPES
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_nested or tensor.is_meta or tensor._is_zerotensor())
    ):
        return tensor
    wrong = _unstorable(tensor)
    if wrong is not None:
        raise CheckpointError(f"{path()} {wrong}")
    if tensor.is_conj() or tensor.is_neg():
        return tensor.detach().resolve_conj().resolve_neg()
    return tensor


def raw(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, on the host, whatever its strides."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return bytes_of(dense) if dense.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def bytes_of(dense: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor, as bytes."""
    # A single element is contiguous whatever its stride is, which reshape() keeps and view() does
    # not take.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether dtype, shape and bytes are equal. Unlike with :func:`torch.equal`, NaNs equal
    themselves and -0.0 is not 0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(raw(one), raw(other))


def assign(target: Tensor, values: Tensor) -> None:
    """Does ``target.copy_(values)``, also if elements of the target share memory (expanded views),
    which must then be equal."""
    for dim, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)


def order_in_memory(tensor: Tensor) -> list[int] | None:
    """Returns how to permute a dense tensor that is not contiguous (transposed, channels last) so
    that it is; ``None`` for any other."""
    if tensor.is_contiguous() or tensor.dim() < 2:
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    return order if tensor.permute(order).is_contiguous() else None


def device_name(device: torch.device) -> str:
    """Returns the name of a device, without its number if it is the process's own: another process
    may use another one."""
    module = getattr(torch, device.type, None)
    current = getattr(module, "current_device", None)
    return device.type if current is not None and device.index == current() else str(device)


def device_named(name: str) -> torch.device:
    """Returns the device of this name, or the nearest that is available."""
    device = torch.device(name)
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and (module is None or not getattr(module, "is_available", bool)()):
        return torch.device("cpu")
    if device.index is not None and device.index >= module.device_count():  # type: ignore[union-attr]
        return torch.device(device.type)
    return device
