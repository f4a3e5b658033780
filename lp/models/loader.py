"""Load a causal LM and its tokenizer; an error names in one line what is wrong with the checkpoint."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lp.errors import UserError
from lp.models.auto_class import auto_class, model_class
from lp.models.rope import rope_boundary
from lp.models.sharded_loader import load_divided
from lp.models.support import check_supported
from lp.models.tensor_parallel import Plan
from lp.models.vocabulary import embedded_tokens
from lp.optional import is_installed
from lp.parallel.context import ParallelContext

HUB_TIMEOUT_S = 5.0  # for one request that shows whether the hub can be reached; set by hand
DEMO_MODEL = Path(__file__).parent / "demo"
logger = logging.getLogger(__name__)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelSource(NamedTuple):
    """Where transformers finds a model that a user has named.

    Attributes:
        shown: the name that the user gave, for messages.
        place: a folder, or a name on the hub.
        options: arguments for every `from_pretrained`: {"gguf_file": "model.gguf"} for a GGUF file, else empty.
    """

    shown: str
    place: str
    options: dict[str, Any]


class Loaded(NamedTuple):
    """A model ready to decode, and its tokenizer: `model, tokenizer = lp.load(...)`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(
    name_or_path: str | Path,
    dtype: str | torch.dtype = "float32",
    device: str | int | torch.device | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    context: ParallelContext | None = None,
    tp_plan: Plan | None = None,
) -> Loaded:
    """Load a causal LM and its tokenizer from a folder, a GGUF file or the hub, through transformers.

    On a CPU, weights in the checkpoint's own dtype stay mapped from its file, and weights in another dtype are a cast
    copy. For a GPU they are cast on the GPU, one tensor after the other, so that the host holds no cast copy.

    Args:
        name_or_path: folder with config.json, a GGUF file or a folder with one, or a hub name; "demo" is the model that
            comes with lp. Weights of a GGUF file, of whatever quantisation, are expanded to `dtype` and computed in it.
        dtype: float64, float32, bfloat16 or float16, as a name or as torch's dtype; "auto" takes the checkpoint's.
        device: torch device for the weights, or a GPU's number; None: the context's device, or without a context a GPU
            if torch sees one, else the CPU.
        attn_implementation: transformers' name of an attention function; None takes sdpa where the model has it.
        trust_remote_code: whether to run code that comes with the checkpoint.
        context: the ranks of a distributed run. The ranks of a replica divide the model among them, and each reads only
            its own part. None: one process.
        tp_plan: how the ranks divide the model, in the form of transformers' `base_model_tp_plan`, such as
            {"layers.*.mlp.up_proj": "colwise"}; None takes the model's own plan.

    Raises:
        ValueError: no such folder, not a causal LM, an architecture that takes no tree mask, weights that are damaged,
            missing or of other shapes than the config says, a tokenizer that is missing, damaged or larger than the
            model's vocabulary, a package that is not installed, an unknown dtype, a device that torch does not have, or
            a model that its ranks cannot divide.
    """
    device = _device(device if device is not None else (context or ParallelContext.single()).device)
    source = model_source(name_or_path)
    dtype = str(dtype).removeprefix("torch.")
    if dtype != "auto" and dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; it must be one of {[*DTYPES, 'auto']}")
    offline = not Path(source.place).is_dir() and not hub_answers()
    config = _config(source, trust_remote_code, offline)
    if not (attn_implementation or trust_remote_code):
        _check_attention(source.shown, config)
    check_supported(config)
    kwargs: dict[str, Any] = {
        "dtype": DTYPES.get(dtype, "auto"),
        "trust_remote_code": trust_remote_code,
        "local_files_only": offline,
        **source.options,
    }
    if attn_implementation:
        kwargs["attn_implementation"] = attn_implementation
    if context and context.replica.size > 1:
        if source.options:
            raise UserError(
                f"{source.shown!r} is a GGUF file, which the ranks of a replica cannot read by parts; save it as a "
                "folder once (lp.load(FILE).model.save_pretrained(FOLDER)) and load that, or choose tp=1"
            )
        model = load_divided(source.place, config, context.replica, device, plan=tp_plan, **kwargs)
        tokenizer = _tokenizer(source, trust_remote_code, offline)
        check_vocabulary(model, tokenizer)
        return Loaded(model.eval(), tokenizer)
    on_cpu = device.type == "cpu"
    quantised = getattr(config, "quantization_config", None) is not None and not source.options
    if quantised and not on_cpu:
        kwargs["device_map"] = {"": device}  # such weights may not be moved once they are loaded
    castable = dtype in DTYPES and not on_cpu and not quantised and not _keeps_float32(config)
    model = _model(source, config, kwargs | {"dtype": "auto"} if castable else kwargs)
    if castable and not cast_on(device, model, DTYPES[dtype]):
        model = _model(source, config, kwargs)
    tokenizer = _tokenizer(source, trust_remote_code, offline)
    check_vocabulary(model, tokenizer)
    return Loaded((model if quantised else model.to(device)).eval(), tokenizer)


def load_tokenizer(name_or_path: str | Path, trust_remote_code: bool = False) -> tuple[PreTrainedTokenizerBase, int]:
    """Load a model's tokenizer and its vocabulary size, without reading weights.

    Args:
        name_or_path: folder with config.json, a GGUF file or a folder with one, or a hub name; "demo" is the model that
            comes with lp.
        trust_remote_code: whether to run code that comes with the checkpoint.

    Returns:
        The tokenizer, and the vocabulary size that the model's config names.

    Raises:
        ValueError: the model's config or tokenizer is missing, damaged or unknown.
    """
    source = model_source(name_or_path)
    offline = not Path(source.place).is_dir() and not hub_answers()
    config = _config(source, trust_remote_code, offline)
    return _tokenizer(source, trust_remote_code, offline), int(config.get_text_config().vocab_size)


def model_source(name_or_path: str | Path) -> ModelSource:
    """Find out what a user's name for a model stands for: "demo", a folder, a GGUF file or a name on the hub.

    Raises:
        ValueError: the GGUF file does not exist, the folder has several GGUF files, or a package that reads them is
            missing.
    """
    shown = str(name_or_path)
    if shown == "demo":
        return ModelSource(shown, str(DEMO_MODEL), {})
    path = Path(os.path.expanduser(shown))  # ~ of model.name=~/x
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise UserError(
                f"GGUF file {shown!r} does not exist; give the path of a file, or a folder with config.json"
            )
        file = path
    elif path.is_dir() and not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
        if len(files) > 1:
            names = ", ".join(each.name for each in files)
            raise UserError(f"{shown!r} has {len(files)} GGUF files ({names}); name one of them")
        file = files[0]
    else:
        return ModelSource(shown, str(path) if shown.startswith("~") else shown, {})
    if missing := [name for name in ("gguf", "accelerate") if not is_installed(name)]:
        raise UserError(f"{shown!r} is read by the packages gguf and accelerate; pip install {' '.join(missing)}")
    return ModelSource(shown, str(file.parent), {"gguf_file": file.name})


def _device(device: str | int | torch.device) -> torch.device:
    """A device that torch has.

    Raises:
        ValueError: it has none of this name, or it is not there.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise UserError(
            f"device is {device!r}, which torch does not have here ({reason}); give cpu, or cuda:0"
        ) from error
    return found


def cast_on(device: str | torch.device, model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Move a model to a device and cast it there, tensor by tensor, as if it had been loaded in that dtype.

    The host then holds no cast copy of the weights.

    Args:
        device: device to move the weights to.
        model: loaded in the dtype of its checkpoint.
        dtype: dtype that its parameters have from now on.

    Returns:
        Whether the model was moved and cast. False: the dtype of its buffers depends on the dtype that it is loaded in,
        so it must be loaded in the wanted dtype instead.
    """
    with torch.device("meta"):
        expected = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    if any(mine.dtype != theirs.dtype for mine, theirs in zip(model.buffers(), expected.buffers(), strict=True)):
        return False
    moved: dict[int, torch.nn.Parameter] = {}  # by the id of the one that it replaces: weights may be tied
    for parameter in model.parameters():
        values = parameter.detach().to(device)
        values = values.to(dtype) if values.is_floating_point() else values
        moved[id(parameter)] = torch.nn.Parameter(values, parameter.requires_grad)
    for module in model.modules():
        module._parameters.update({name: moved[id(one)] for name, one in module._parameters.items() if one is not None})
    model.to(device)  # the buffers
    for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
        config.dtype = dtype
    return True


def _keeps_float32(config: Any) -> bool:
    """Whether transformers leaves some weights in float32 whatever dtype is asked for."""
    kind = model_class(config)
    if kind is None:
        return True  # code of the checkpoint: nobody knows
    return any(getattr(kind, f"_keep_in_fp32_modules{which}", None) for which in ("", "_strict"))


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that can produce token ids for which the model has no embedding.

    Raises:
        ValueError: names the tokenizer's largest id and the number of embeddings.
    """
    largest_id = max(tokenizer.get_vocab().values(), default=-1)
    embedded = embedded_tokens(model)
    if largest_id >= embedded:
        raise UserError(
            f"the tokenizer's largest id is {largest_id} but the model embeds {embedded} tokens; "
            "load the tokenizer that belongs to this model"
        )


def vocabulary_size(model: PreTrainedModel) -> int:
    """Number of logits that a model's LM head gives for a token."""
    head = model.get_output_embeddings()
    size: int = getattr(head, "out_features", None) or head.weight.shape[0]  # a quantised weight may be packed
    return size


def context_limit(model: PreTrainedModel) -> int | None:
    """The most positions that a model can take, by its config; None where the config names no limit."""
    config = model.config.get_text_config()
    boundary = rope_boundary(config)
    stretched = boundary.stretched if boundary else None
    return stretched or getattr(config, "max_position_embeddings", None)


def _config(source: ModelSource, trust_remote_code: bool, offline: bool) -> Any:
    shown = source.shown
    if source.place.startswith(("/", ".", "~")) and not Path(source.place).is_dir():
        raise UserError(f"model folder {shown!r} does not exist; give a folder with config.json, a hub name or 'demo'")
    try:
        config = AutoConfig.from_pretrained(
            source.place, trust_remote_code=trust_remote_code, local_files_only=offline, **source.options
        )
    except Exception as error:  # nothing of ours runs in there, and each release raises something else
        if offline:
            raise UserError(
                f"cannot load {shown!r}: it is no folder here, not in the local cache, and the hub cannot be reached; "
                "give a folder with config.json, or 'demo' for the embedded model"
            ) from error
        has_code = "trust_remote_code" in str(error)
        remedy = "; model.trust_remote_code=true runs that code, if you trust it" if has_code else ""
        raise UserError(f"cannot read a model config from {shown!r}: {_first_line(error)}{remedy}") from error
    if model_class(config) is None and not trust_remote_code:
        raise UserError(f"{shown!r} is a {config.model_type!r} model, which is not a causal LM in transformers")
    return config


def _check_attention(source: str, config: Any) -> None:
    """Refuse a config that names a repository of the hub as its attention: transformers would run that one's code."""
    named = str(getattr(config, "_attn_implementation", None) or "")
    if "/" in named:
        raise UserError(
            f"the config of {source!r} asks for the attention {named!r}, which is code from the hub; choose "
            "attention=sdpa (attn_implementation='sdpa' of lp.load), or model.trust_remote_code=true if you trust it"
        )
    for part in getattr(config, "sub_configs", ()):  # of the text, the images, ...
        if (inner := getattr(config, part, None)) is not None:
            _check_attention(source, inner)


def hub_answers() -> bool:
    """Whether the Hugging Face hub can be reached, by one quick request.

    The hub's own client would try five times for each file, for half a minute.
    """
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.utils.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception:  # of whichever HTTP client this release has
        return False
    return True


def _model(source: ModelSource, config: Any, kwargs: dict[str, Any]) -> PreTrainedModel:
    shown = source.shown
    try:
        with without_report():
            model, info = auto_class(config).from_pretrained(
                source.place,
                config=config,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with names
                **kwargs,
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # ImportError, SafetensorError, ...: nothing of ours runs in there
        damaged = _damaged(source.place)
        where = f"{shown!r}: {damaged} is damaged or incomplete" if damaged else repr(shown)
        lacks_package = isinstance(error, ImportError) and "attn_implementation" in kwargs
        remedy = "; install it, or choose attn_implementation=sdpa" if lacks_package else _pickled(source.place)
        raise UserError(f"cannot load {where}: {_first_line(error)}{remedy}") from error
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise UserError(
            f"cannot load {shown!r}: config.json makes {name} {tuple(expected)}, the weights have {tuple(stored)}; "
            "use the config that belongs to these weights"
        )
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"cannot load {shown!r}: the weights have no {missing[0]} (of {len(missing)} missing); "
            "use a complete checkpoint of a causal LM, with the config that belongs to it"
        )
    if unused := sorted(info["unexpected_keys"]):
        logger.warning("%s: %d weights are not used by this model, among them %s", shown, len(unused), unused[0])
    if source.options:  # the weights are those of any other model by now, and can be saved
        model.hf_quantizer.remove_quantization_config(model)
    return model


def _tokenizer(source: ModelSource, trust_remote_code: bool, offline: bool) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(
            source.place, trust_remote_code=trust_remote_code, local_files_only=offline, **source.options
        )
    except Exception as error:
        remedy = (
            "take a GGUF file that has its tokenizer"
            if source.options
            else "a good tokenizer.json (or another tokenizer's files) must lie beside the weights"
        )
        raise UserError(f"cannot load the tokenizer of {source.shown!r}: {_first_line(error)}; {remedy}") from error


def _damaged(source: str) -> str | None:
    """The first weight file in a folder that cannot be opened."""
    for path in sorted(Path(source).glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except Exception:
            return path.name
    return None


def _pickled(source: str) -> str:
    """The remedy to name for a folder that has pickled weights alone, which may run code when they are read."""
    folder = Path(source)
    pickles = [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("*.bin"))
    return f"; {pickles[0].name} is a pickle, which is not read: convert it to safetensors" if pickles else ""


@contextmanager
def without_report() -> Iterator[None]:
    """Context manager in which transformers does not log its table of missing, unexpected and misfitting weights.

    The loader reports the important part of that table in one line.
    """

    def is_no_report(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    reporters = [logging.getLogger(f"transformers.{name}") for name in ("modeling_utils", "integrations.peft")]
    for reporter in reporters:
        reporter.addFilter(is_no_report)
    try:
        yield
    finally:
        for reporter in reporters:
            reporter.removeFilter(is_no_report)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().split("\n")]
    message = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__} {message}" if isinstance(error, KeyError) else message.rstrip(".,")
