"""Train the embedded demo model: a small Llama on the Python source already on this machine.

    python scripts/train_demo_model.py --minutes 110            # data, tokenizer, training, model card
    python scripts/train_demo_model.py --hybrid --out FOLDER    # a Qwen3.5: three of four layers are recurrent
    python scripts/train_demo_model.py --stage data             # only collect, de-duplicate, tokenise
    python scripts/train_demo_model.py --vocab-size 32000 --begin-with lp/models/demo --out FOLDER

Data: the standard library and every installed distribution under a permissive licence (read from its
metadata). Files are de-duplicated exactly and by shared lines, and one in 64 is held out, by file.
Optimiser: torch.optim.Muon for the matrices, AdamW for the embedding and the norms. Precision: bf16
autocast over float32 master weights. The schedule follows the clock, so `--minutes` is what it takes.
Shapes: B sequences, T tokens a sequence.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

EOS = "<|endoftext|>"
PERMISSIVE = re.compile(r"\b(MIT|BSD|0BSD|Apache|PSF|ISC|Python Software Foundation|HPND)\b", re.I)
RESTRICTED = re.compile(r"GPL|MPL|Mozilla|EPL|CDDL|Proprietary|NVIDIA", re.I)
# A GPT-4-like split: one leading mark joins a word, marks keep the line break behind them, indentation stands alone.
SPLIT = r"[^\r\n\w]?[^\W\d]+|\d| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTEXT, SHORT_T = 2048, 512
# Keep freed blocks: giving every activation back to the kernel costs a third of a step in page faults.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11), "MALLOC_TOP_PAD_": str(2**28)}
SHINGLE_LINES, MAX_SHARED, MAX_FILE_BYTES = 3, 0.5, 100_000


def licence_of(dist: importlib.metadata.Distribution) -> str | None:
    """The licence line of a distribution when it is permissive, else None."""
    meta = dist.metadata
    classifiers = " ".join(c for c in meta.get_all("Classifier", []) if c.startswith("License"))
    text = f"{meta.get('License-Expression') or (meta.get('License') or '')[:60]} {classifiers}".strip()  # type: ignore[attr-defined]
    if not PERMISSIVE.search(text) or RESTRICTED.search(text):
        return None
    return text.replace("License :: OSI Approved :: ", "").split("\n")[0][:60]


def source_files() -> Iterator[tuple[str, str, Path]]:
    """Yield (distribution, name, path) of every Python file the training may use."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in stdlib.rglob("*.py"):
        name = path.relative_to(stdlib)
        if not {"site-packages", "lib2to3"} & set(name.parts):
            yield "python", str(name), path
    for dist in importlib.metadata.distributions():
        if licence_of(dist):
            for file in dist.files or []:
                if file.suffix == ".py" and "_vendor" not in file.parts:
                    yield dist.name, str(file), Path(str(file.locate()))


def readable(path: Path) -> str | None:
    """The text of a file that a person wrote, or None (tables, generated code, other encodings)."""
    try:
        text = path.read_text("utf-8")[:MAX_FILE_BYTES].replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None
    lines = text.splitlines()
    if len(text) < 200 or len(lines) < 8 or max(map(len, lines)) > 300:
        return None
    letters = sum(c.isalpha() or c.isspace() for c in text) / len(text)
    return text if letters > 0.6 and text.isascii() else None


def collect() -> tuple[dict[str, list[str]], dict[str, int]]:
    """De-duplicated texts by split, and bytes kept by distribution.

    Held-out files are placed first, so a training file that shares most of its lines with one is dropped.
    """
    files = {name: (dist, path) for dist, name, path in source_files()}

    def key(name: str) -> str:
        return hashlib.sha256(name.encode()).hexdigest()

    held = {name for name in files if int(key(name), 16) % 64 == 0}
    seen: set[int] = set()
    texts: dict[str, list[str]] = {"train": [], "held_out": []}
    kept: dict[str, int] = {}
    for name in sorted(files, key=lambda n: (n not in held, key(n))):
        dist, path = files[name]
        text = readable(path)
        if text is None:
            continue
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        shingles = {hash(tuple(lines[i : i + SHINGLE_LINES])) for i in range(len(lines))}
        if len(shingles & seen) > MAX_SHARED * len(shingles):
            continue
        seen |= shingles
        texts["held_out" if name in held else "train"].append(text)
        kept[dist] = kept.get(dist, 0) + len(text)
    return texts, kept


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tok = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tok.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token=EOS, pad_token=EOS, model_max_length=CONTEXT, clean_up_tokenization_spaces=False
    )


def prepare(work: Path, out: Path, vocab_size: int) -> dict:
    """Collect, tokenise and store the data once; later runs reuse it."""
    facts_file = work / "facts.json"
    if facts_file.exists():
        return json.loads(facts_file.read_text())
    texts, kept = collect()
    tokenizer = train_tokenizer(texts["train"][::3], vocab_size)
    tokenizer.save_pretrained(out)
    facts: dict = {"bytes_by_distribution": kept}
    for split, docs in texts.items():
        ids = [np.array([*e, tokenizer.eos_token_id], dtype=np.uint16) for e in tokenizer(docs)["input_ids"]]
        np.save(work / f"{split}.npy", np.concatenate(ids))
        facts[split] = {"files": len(docs), "bytes": sum(map(len, docs)), "tokens": int(sum(map(len, ids)))}
    facts_file.write_text(json.dumps(facts, indent=1))
    return facts


def batches(ids: np.ndarray, rows: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Packed rows (B, T+1) from a random offset on, in random order, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        offset = int(rng.integers(length))
        starts = rng.permutation(np.arange(offset, len(ids) - length - 1, length))
        for i in range(0, len(starts) - rows + 1, rows):
            yield torch.from_numpy(np.stack([ids[s : s + length + 1] for s in starts[i : i + rows]]).astype(np.int64))


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(rows[:, :-1], use_cache=False).logits  # (B, T, V)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, ids: np.ndarray, n_bytes: int, limit: int | None = None) -> float:
    """Held-out bits per byte in rows of the whole context, each row's first token unscored."""
    rows = [ids[s : s + CONTEXT + 1] for s in range(0, len(ids) - 1, CONTEXT)][:limit]
    nats = tokens = 0.0
    for row in rows:
        nats += float(loss_of(model, torch.from_numpy(row.astype(np.int64))[None])) * (len(row) - 1)
        tokens += len(row) - 1
    return nats / tokens * (len(ids) / n_bytes) / math.log(2)


def rate(progress: float, decay_from: float) -> float:
    """Learning-rate factor: linear warm-up over 1 %, constant, linear to zero."""
    return min(progress / 0.01, 1.0) if progress < decay_from else max((1 - progress) / (1 - decay_from), 0.0)


def config_of(args: argparse.Namespace) -> PretrainedConfig:
    sizes = dict(
        vocab_size=args.vocab_size, hidden_size=args.hidden, intermediate_size=args.intermediate,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64, num_key_value_heads=args.kv_heads,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    if not args.hybrid:
        return LlamaConfig(**sizes)
    from transformers import Qwen3_5TextConfig  # not in older releases

    return Qwen3_5TextConfig(
        **sizes, head_dim=64, linear_key_head_dim=64, linear_num_key_heads=args.kv_heads, linear_value_head_dim=64,
        linear_num_value_heads=args.hidden // 64,
    )  # fmt: skip


@torch.no_grad()
def copy_weights(model: PreTrainedModel, folder: Path, out: Path) -> None:
    """Weights of a model of the same sizes; an embedding is the mean of those of the token's parts over there."""
    old = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(
        {k: v for k, v in old.state_dict().items() if v.shape[0] != old.config.vocab_size}, strict=False
    )
    old_tokenizer, tokenizer = (PreTrainedTokenizerFast.from_pretrained(f) for f in (folder, out))
    embedding, known = model.get_input_embeddings().weight, old.get_input_embeddings().weight
    for token in range(1, len(tokenizer)):
        embedding[token] = known[old_tokenizer(tokenizer.decode([token]))["input_ids"] or [0]].mean(0)
    embedding[0] = known[old.config.eos_token_id]


def train(args: argparse.Namespace, facts: dict) -> tuple[PreTrainedModel, dict]:
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(config_of(args))
    if args.begin_with:
        copy_weights(model, args.begin_with, args.out)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=args.muon_lr, momentum=0.95, weight_decay=args.weight_decay)
    adamw = torch.optim.AdamW(others, lr=args.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
    base = {id(o): o.param_groups[0]["lr"] for o in (muon, adamw)}
    ids = np.load(args.work / "train.npy")
    held_out = np.load(args.work / "held_out.npy")
    streams = {t: batches(ids, args.batch_tokens // t, t, args.seed) for t in (SHORT_T, CONTEXT)}
    budget_s = args.minutes * 60
    start = time.monotonic()
    tokens = 0
    step = 0
    log: list[float] = []
    while (progress := (time.monotonic() - start) / budget_s) < 1:
        rows = next(streams[CONTEXT if progress > 1 - args.long_share else SHORT_T])
        loss = loss_of(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in (muon, adamw):
            optimiser.param_groups[0]["lr"] = base[id(optimiser)] * rate(progress, args.decay_from)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        tokens += rows.shape[0] * (rows.shape[1] - 1)
        step += 1
        log.append(float(loss))
        if step % 100 == 0:
            took = time.monotonic() - start
            bpb = bits_per_byte(model, held_out, facts["held_out"]["bytes"], 8) if step % 500 == 0 else float("nan")
            print(f"{took:6.0f} s step {step} tokens {tokens / 1e6:.2f} M {tokens / took:.0f} tok/s", end=" ")
            print(f"loss {sum(log[-100:]) / 100:.4f} bpb {bpb:.3f}", flush=True)
            model.save_pretrained(args.work / "latest")
    model.to(torch.bfloat16)
    bpb = bits_per_byte(model, held_out, facts["held_out"]["bytes"])
    losses = {"held_out_bits_per_byte": round(bpb, 4), "train_loss_nats": round(sum(log[-100:]) / len(log[-100:]), 4)}
    return model, {"steps": step, "tokens": tokens, **losses}


CARD = """---
license: apache-2.0
language: code
---
# lp demo model

A {parameters:.1f} M-parameter {architecture} for Python completion, trained by `scripts/train_demo_model.py` so that this
repository can show and test decoding without a download. It knows little, and its greedy text soon repeats itself.

| | |
|---|---|
| architecture | {architecture}, hidden {hidden}, {layers} layers, {heads} query / {kv_heads} KV heads x 64, vocabulary {vocab_size} (byte-level BPE), context {context} |
| weights | bf16 safetensors, {megabytes:.1f} MB |
| held-out | **{held_out_bits_per_byte} bits per byte** on {held_files} held-out files ({held_bytes:,} bytes), bf16 |
| training | {tokens:,} tokens in {steps} steps, {minutes:g} minutes on {threads} CPU threads, final training loss {train_loss_nats} nats a token |
| data | {train_files} files, {train_bytes:,} bytes, {train_tokens:,} tokens |
| optimiser | Muon ({muon_lr}) for the matrices, AdamW ({adamw_lr}) for the rest, batch {batch_tokens} tokens, linear decay from {decay_from:.0%} on |
| rows | {short} tokens, {context} for the last {long_share:.0%} of the time |

Make it again: `python scripts/train_demo_model.py --minutes {minutes:g} --seed {seed}` (the data is what is installed, so
figures move a little with versions).

## Data and licences
Python files of the standard library and of installed distributions under permissive licences, exact and near
duplicates (over half of a file's three-line runs seen before) dropped, ASCII text under {max_file:,} bytes a file.
One file in 64, chosen by a hash of its name, is held out.

| distribution | licence | bytes |
|---|---|---|
{table}
"""  # noqa: E501


def write_card(args: argparse.Namespace, facts: dict, result: dict, model: PreTrainedModel) -> None:
    licences = {dist.name: licence_of(dist) or "" for dist in importlib.metadata.distributions()}
    licences.setdefault("python", "PSF-2.0")
    table = "\n".join(
        f"| {name} | {licences.get(name, '')} | {n:,} |"
        for name, n in sorted(facts["bytes_by_distribution"].items(), key=lambda kv: -kv[1])
    )
    card = CARD.format(
        **result, architecture=type(model).__name__, parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        hidden=args.hidden, layers=args.layers,
        heads=args.hidden // 64, kv_heads=args.kv_heads, vocab_size=args.vocab_size, context=CONTEXT, short=SHORT_T,
        megabytes=(args.out / "model.safetensors").stat().st_size / 1e6, held_files=facts["held_out"]["files"],
        held_bytes=facts["held_out"]["bytes"], minutes=args.minutes, threads=torch.get_num_threads(),
        train_files=facts["train"]["files"], train_bytes=facts["train"]["bytes"], train_tokens=facts["train"]["tokens"],
        muon_lr=args.muon_lr, adamw_lr=args.adamw_lr, batch_tokens=args.batch_tokens, decay_from=args.decay_from,
        long_share=args.long_share, seed=args.seed, max_file=MAX_FILE_BYTES, table=table,
    )  # fmt: skip
    (args.out / "README.md").write_text(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("lp/models/demo"))
    parser.add_argument("--work", type=Path, default=Path("outputs/train_demo_model"))
    parser.add_argument("--stage", choices=["data", "all"], default="all")
    parser.add_argument("--minutes", type=float, default=110)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--begin-with", type=Path, help="a model of the same sizes, whatever its vocabulary")
    parser.add_argument("--hybrid", action="store_true", help="gated delta rule in three of four layers")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=12288)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adamw-lr", type=float, default=0.004)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--decay-from", type=float, default=0.4, help="share of the time after which the rate falls")
    parser.add_argument("--long-share", type=float, default=0.12, help="share of the time on rows of the whole context")
    args = parser.parse_args()
    if not MALLOC.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    torch.set_num_threads(args.threads)
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    facts = prepare(args.work, args.out, args.vocab_size)
    print(json.dumps({k: facts[k] for k in ("train", "held_out")}), flush=True)
    if args.stage == "data":
        return
    model, result = train(args, facts)
    model.save_pretrained(args.out)
    write_card(args, facts, result, model)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
