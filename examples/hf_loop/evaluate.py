"""Load an exported model with transformers alone, and print its loss on sums that it has not seen."""

from __future__ import annotations

import sys

import torch
from train import text_batch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main() -> None:
    """Load the folder, and compute the loss of one batch."""
    logging.disable_progress_bar()
    folder = sys.argv[1]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = text_batch(torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss
    print(f"{type(model).__name__}, {model.num_parameters():,} parameters, loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
