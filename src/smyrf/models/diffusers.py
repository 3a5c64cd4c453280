"""`intercept_diffusers`: another method for the attention of a diffusers model or pipeline, inside a block."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import nn

from smyrf.call import Reason
from smyrf.methods import Dense
from smyrf.models.assignment import NOT_GIVEN, Methods, check_methods, choose, choose_backend
from smyrf.models.changed import changed
from smyrf.models.report import Layer, Report
from smyrf.models.sdpa import Interception, check_from_keys, innermost

# Components of a pipeline that denoise; text encoders and image decoders are left alone.
DENOISERS = ("unet", "transformer", "prior", "decoder")

# The backends of diffusers that call PyTorch's attention, and so can be intercepted.
NATIVE = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")

# Processors that compute attention themselves, and their counterparts that call PyTorch's function.
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
def intercept_diffusers(
    model: Any, method: Methods, *, from_keys: int = 256, backend: str | None = None
) -> Iterator[Report]:
    """Inside the block, the attention of a diffusers model is served by a method, whichever thread runs it.

    Blocks of one thread may be nested; another thread that enters one for the same model meanwhile is refused.

    This covers UNets and transformers: everything that calls PyTorch's attention, directly or through a backend of
    diffusers. If another backend or an eager, sliced or xformers processor is active, PyTorch's function takes its
    place inside the block. Afterwards everything is as before: the same processor objects, the same backends.

    A call that the method cannot serve runs densely and is counted with the reason, as in `smyrf.intercept_sdpa`. A
    layer that is never counted makes no such calls: linear attention, for example.

    Args:
        model: a model, or a pipeline, which stands for its UNet or transformer.
        method: as for `smyrf.replace_attention`: for all attention modules; the plan of `smyrf.tune`; a mapping from
            module names, which leaves other modules as they are; or one for each. In a pipeline names begin with
            that of the component: "transformer.blocks.0.attn1".
        from_keys: calls with fewer keys stay dense: the words of a prompt are too few to save anything.
        backend: as in `smyrf.intercept_sdpa`; a plan's own by default.

    Yields:
        the layers, and how their calls were served, counted as they are made.

    Raises:
        ValueError: the model has nothing to replace; says why, before anything is changed.

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
    backend = choose_backend(method, backend)
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
                stack.enter_context(changed(module, "processor", counterpart()))
            if getattr(module.processor, "_attention_backend", None) not in (None, *NATIVE):
                native = attention_dispatch.AttentionBackendName.NATIVE
                stack.enter_context(changed(module.processor, "_attention_backend", native))
            mode = Interception(layer.method, layer.calls, layer.from_keys, backend)
            stack.enter_context(changed(module, "forward", _intercepted(module.forward, mode)))
            stack.enter_context(changed(module, "__deepcopy__", _refuse_copy))
        yield report


def _attention_modules(model: Any) -> dict[str, nn.Module]:
    """Modules with a processor, by name."""
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
    """The layer of each module; raises if none can be replaced."""
    if not modules:
        raise ValueError(f"model: {model} has no attention module of diffusers, so there is nothing to replace")
    unable = {name: why for name, module in modules.items() if (why := _only_dense(module))}
    details = {name: detail for name, (_, detail) in unable.items()}
    if len(unable) == len(modules):
        raise ValueError(
            f"model: {model} has no attention that can be replaced: {', '.join(dict.fromkeys(details.values()))}"
        )
    choices = choose(method, list(modules), details)
    layers = []
    for name in modules:
        chosen = choices.get(name, NOT_GIVEN)
        reason, detail = unable.get(name, (chosen.reason, chosen.detail))
        if reason is None:
            layers.append(Layer(name, chosen.method, max(from_keys, chosen.min_keys)))
        else:
            layers.append(Layer(name, Dense(), reason=reason, detail=detail))
    return layers


def _only_dense(module: nn.Module) -> tuple[Reason, str] | None:
    """Why the attention of a module cannot be replaced, as a reason and as text; None if it can."""
    processor = module.processor
    reason, kind = None, type(processor).__name__
    if getattr(processor, "_parallel_config", None) is not None:
        reason = Reason.SPLIT
    elif _is_eager(processor):
        if kind not in COUNTERPARTS:
            return Reason.OWN_PROCESSOR, f"its processor {kind} does not call PyTorch's attention"
        if not getattr(module, "scale_qk", True):
            reason = Reason.UNSCALED
    return None if reason is None else (reason, str(reason))


def _is_eager(processor: Any) -> bool:
    """Whether a processor computes attention itself."""
    names = getattr(getattr(type(processor).__call__, "__code__", None), "co_names", ())
    by_itself = "get_attention_scores" in names or "memory_efficient_attention" in names
    return by_itself and "scaled_dot_product_attention" not in names


# The original of each forward pass of ours: of nested blocks the innermost counts, not the one whose mode starts last.
_beneath: WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = WeakKeyDictionary()


def _intercepted(forward: Callable[..., Any], mode: Interception) -> Callable[..., Any]:
    """A module's forward pass inside a mode, unless this thread is in a block inside ours."""
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


# The thread whose blocks a module is in, and their number: blocks of two threads could end in any order.
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
