"""`intercept_diffusers`: another method for the attention of a diffusers model or pipeline, inside a block."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import nn

from smyrf.methods import Dense
from smyrf.models.assignment import NOT_GIVEN, Methods, check_methods, choose
from smyrf.models.report import Layer, Report
from smyrf.models.sdpa import Interception, check_from_keys, innermost

# Components of a pipeline that denoise; what encodes text or decodes images is left alone.
DENOISERS = ("unet", "transformer", "prior", "decoder")

# The backends of diffusers that call PyTorch's attention, and so can be intercepted.
NATIVE = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")

# Processors that compute attention by themselves, and what does the same by PyTorch's function.
COUNTERPARTS = {
    "AttnProcessor": "AttnProcessor2_0",
    "SlicedAttnProcessor": "AttnProcessor2_0",
    "XFormersAttnProcessor": "AttnProcessor2_0",
    "AttnAddedKVProcessor": "AttnAddedKVProcessor2_0",
    "SlicedAttnAddedKVProcessor": "AttnAddedKVProcessor2_0",
    "XFormersAttnAddedKVProcessor": "AttnAddedKVProcessor2_0",
    "XFormersJointAttnProcessor": "JointAttnProcessor2_0",
}


@contextmanager
def intercept_diffusers(model: Any, method: Methods, *, from_keys: int = 256) -> Iterator[Report]:
    """Inside the block, the attention of a diffusers model attends by a method, in whatever thread it is run.

    Blocks of one thread may be nested; another thread that enters one for the same model meanwhile is refused.

    UNets and transformers alike: whatever calls PyTorch's attention, by itself or through a backend of diffusers. Where
    another backend or an eager, sliced or xformers processor is active, PyTorch's function takes its place inside the
    block. Afterwards everything is as it was: the same processor objects, the same backends.

    What the method cannot serve runs densely and is counted with the reason, as in `smyrf.intercept_sdpa`. A layer that
    is never counted makes no such calls: linear attention, for example.

    Args:
        model: a model, or a pipeline, of which its UNet or transformer is meant.
        method: as for `smyrf.replace_attention`: for all attention modules; the plan of `smyrf.tune`; for names of
            modules, and the others stay as they are; or one for each. In a pipeline names begin with that of
            the component: "transformer.blocks.0.attn1".
        from_keys: calls with fewer keys than this stay dense: the words of a prompt are too few to save anything.

    Yields:
        the layers, with counts of their calls as they are made.

    Raises:
        ValueError: names a model that has nothing to replace, and why, before anything is changed.

    Example:
        >>> import smyrf, torch
        >>> from diffusers import DiTTransformer2DModel
        >>> model = DiTTransformer2DModel(
        ...     num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=16, patch_size=1
        ... )
        >>> with smyrf.intercept_diffusers(model, smyrf.Tangent(0.25)) as report:
        ...     out = model(torch.randn(1, 4, 16, 16), torch.tensor([1]), class_labels=torch.tensor([2]))
        >>> print(report)
        DiTTransformer2DModel: 2 of 2 attention layers replaced
        transformer_blocks.0.attn1  Tangent 25%  dense below 256 keys
        transformer_blocks.1.attn1  Tangent 25%  dense below 256 keys
        2 calls by the method
    """
    try:
        from diffusers.models import attention_dispatch, attention_processor
    except ImportError as error:
        raise ImportError("this needs diffusers: pip install 'smyrf[diffusers]'") from error

    check_methods(method)
    check_from_keys(from_keys)
    modules = _attention_modules(model)
    layers = _layers(type(model).__name__, modules, method, from_keys)
    report = Report(type(model).__name__, tuple(layers))

    with ExitStack() as stack:
        stack.enter_context(_claimed([modules[layer.name] for layer in report.replaced]))
        active, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
        if active not in NATIVE:
            stack.enter_context(attention_dispatch.attention_backend("native"))
        for layer in report.replaced:
            module = modules[layer.name]
            if _is_eager(module.processor):
                counterpart = getattr(attention_processor, COUNTERPARTS[type(module.processor).__name__])
                _set(stack, module, "processor", counterpart())
            if getattr(module.processor, "_attention_backend", None) not in (None, *NATIVE):
                _set(stack, module.processor, "_attention_backend", attention_dispatch.AttentionBackendName.NATIVE)
            mode = Interception(layer.method, layer.calls, layer.from_keys)
            _set(stack, module, "forward", _intercepted(module.forward, mode))
            _set(stack, module, "__deepcopy__", _refuse_copy)
        yield report


def _attention_modules(model: Any) -> dict[str, nn.Module]:
    """Those that have a processor, by name."""
    if isinstance(model, nn.Module):
        parts = {"": model}
    elif isinstance(getattr(model, "components", None), dict):
        parts = {
            f"{name}.": part
            for name, part in model.components.items()
            if name.startswith(DENOISERS) and isinstance(part, nn.Module)
        }
    else:
        raise TypeError(f"model must be a model or a pipeline of diffusers, not {type(model).__name__}")
    return {
        prefix + name: module
        for prefix, part in parts.items()
        for name, module in part.named_modules()
        if callable(getattr(module, "processor", None))
    }


def _layers(model: str, modules: dict[str, nn.Module], method: Methods, from_keys: int) -> list[Layer]:
    """What is to become of each module; raises if that is nothing."""
    if not modules:
        raise ValueError(f"model: {model} has no attention module of diffusers, so there is nothing to replace")
    unable = {name: reason for name, module in modules.items() if (reason := _only_dense(module))}
    if len(unable) == len(modules):
        reasons = ", ".join(dict.fromkeys(unable.values()))
        raise ValueError(f"model: {model} has no attention that can be replaced: {reasons}")
    choices = choose(method, list(modules), unable)
    layers = []
    for name in modules:
        chosen = choices.get(name, NOT_GIVEN)
        reason = unable.get(name, chosen.reason)
        at_least = 0 if reason else max(from_keys, chosen.from_keys)
        layers.append(Layer(name, Dense() if reason else chosen.method, at_least, reason=reason))
    return layers


def _only_dense(module: nn.Module) -> str:
    """Why the attention of a module cannot be replaced; "" if it can."""
    processor = module.processor
    if getattr(processor, "_parallel_config", None) is not None:
        return "it is split over several devices"
    if _is_eager(processor):
        if type(processor).__name__ not in COUNTERPARTS:
            return f"its processor {type(processor).__name__} does not call PyTorch's attention"
        if not getattr(module, "scale_qk", True):
            return "its scores are not scaled"
    return ""


def _is_eager(processor: Any) -> bool:
    """Whether a processor computes attention by itself."""
    names = getattr(getattr(type(processor).__call__, "__code__", None), "co_names", ())
    by_itself = "get_attention_scores" in names or "memory_efficient_attention" in names
    return by_itself and "scaled_dot_product_attention" not in names


# The forward pass under each of ours: of several blocks the innermost counts, not the one whose mode starts last.
_beneath: WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = WeakKeyDictionary()


def _intercepted(forward: Callable[..., Any], mode: Interception) -> Callable[..., Any]:
    """A module's forward pass inside a mode, unless a block inside ours has this thread."""
    forward = _beneath.get(forward, forward)
    around = innermost()

    @functools.wraps(forward)
    def ours(*args: Any, **kwargs: Any) -> Any:
        block = innermost()
        if block is not None and block is not around:
            return forward(*args, **kwargs)
        with mode:
            return forward(*args, **kwargs)

    _beneath[ours] = forward
    return ours


# The thread whose blocks a module is in, and how many: blocks that overlap could not be taken away one by one.
_claims: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def _claimed(modules: list[nn.Module]) -> Iterator[None]:
    thread = threading.get_ident()
    with _lock:
        if any(_claims.get(module, (thread, 0))[0] != thread for module in modules):
            raise ValueError("model is inside a block of intercept_diffusers of another thread: share that block")
        for module in modules:
            _claims[module] = (thread, _claims.get(module, (thread, 0))[1] + 1)
    try:
        yield
    finally:
        with _lock:
            for module in modules:
                _, depth = _claims.pop(module)
                if depth > 1:
                    _claims[module] = (thread, depth - 1)


def _refuse_copy(memo: object) -> NoReturn:
    raise TypeError("a model cannot be copied inside a block of intercept_diffusers: the copy would stay in it")


def is_intercepted(module: nn.Module) -> bool:
    """Whether a module is inside a block of `intercept_diffusers`."""
    return vars(module).get("forward") in _beneath


def _set(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Gives an object an attribute of its own, until the stack unwinds."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)
