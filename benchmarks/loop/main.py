"""Scripts of common trainers under `memfit run`, unedited: are the weights those of a run without it?

python -m benchmarks.loop.main --write
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.report import Report

HERE = Path(__file__).parent
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SCRIPTS = {
    "nanoGPT-like, accumulation, `--compile`": ("../../../tests/script/scripts/language_model.py", "--compile"),
    "GAN, two optimizers": ("../../../tests/script/scripts/adversarial.py",),
    "ResNet-18, loss outside, averaged copy, evaluation": ("resnet_ema.py",),
    "timm ViT, drop path, mixup, clipping": ("timm_mixup.py",),
    "HF Trainer, accumulation, evaluation, resume": ("hf_trainer.py",),
    "HF Trainer, bf16": ("hf_trainer.py", "--bf16"),
    "TRL `SFTTrainer`, checkpointed": ("trl_sft.py",),
    "TRL `SFTTrainer`, LoRA, bf16, no padding": ("trl_sft.py", "--lora", "--bf16", "--padding-free"),
    "Lightning, accumulation, validation": ("lightning_module.py",),
    "accelerate, accumulation, clipping": ("accelerate_loop.py",),
    "PEFT LoRA, grouped queries": ("peft_lora.py",),
    "diffusers U-Net": ("diffusers_unet.py",),
    "DDP by torchrun, two processes": (TORCHRUN, "--nproc-per-node", "2", "ddp.py"),
}
COLUMNS = ("script", "plain, s", "where plain fits", "s", "least budget", "weights there", "s", "plans")
LARGE, SMALL = "4GiB", "1KiB"
LEAST = re.compile(r"least budget that works is [^(]*\((\d+) bytes\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a script ended."""

    weights: str
    seconds: float
    told: str


def ran(words: tuple[str, ...], budget: str = "") -> Run:
    """Runs a script, under `memfit run` if there is a budget."""
    by = ["-m", "memfit", "run", "--budget", budget, "--search-seconds", "1"] if budget else []
    start = [] if not by and words[0] == TORCHRUN else [sys.executable]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    done = subprocess.run(
        [*start, *by, *words], cwd=HERE / "scripts", env=environment, capture_output=True, text=True, timeout=1200
    )
    lines = [line for line in done.stdout.splitlines() if re.fullmatch(r"(weights )?[0-9a-f]{16,64}", line)]
    return Run(weights=lines[-1] if lines else "", seconds=time.perf_counter() - begin, told=done.stderr)


def equal(one: Run, other: Run) -> str:
    """Whether two runs ended with the same weights."""
    if not one.weights or not other.weights:
        return "no weights"
    return "equal" if one.weights == other.weights else "DIFFERENT"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="part of a script's name")
    args = parser.parse_args()
    report = Report(HERE / "README.md", write=args.write, device=torch.device("cpu"))
    table = report.table("Scripts under `memfit run`", COLUMNS)
    for name, words in SCRIPTS.items():
        if args.only not in name:
            continue
        plain, fits = ran(tuple(word for word in words if word != "--compile")), ran(words, LARGE)
        numbers = [int(n) for n in LEAST.findall(ran(words, SMALL).told)]
        cells = [name, f"{plain.seconds:.1f}", equal(plain, fits), f"{fits.seconds:.1f}"]
        if not numbers:
            report.add(table, *cells, "not told", "", "", "")
            continue
        least = max(numbers)
        tight = ran(words, f"{int(least * 1.02)}")
        plans = tight.told.count(" measured, of ") - len(re.findall(r"measured, of [^\n]* plans\.", tight.told))
        cells += [f"{least / 2**20:.2f} MiB", equal(plain, tight), f"{tight.seconds:.1f}", str(plans)]
        report.add(table, *cells)


if __name__ == "__main__":
    main()
