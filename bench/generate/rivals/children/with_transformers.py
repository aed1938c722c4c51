"""transformers' ``generate`` on one thread, prompts of a group in one batch."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from lines import Answering, serve, until_end


def load(folder: str) -> tuple[str, Answering]:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def answer(prompts: list[list[int]], tokens: int, end: list[int]) -> dict[str, Any]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[end[0]] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        there: list[float] = []

        def noted(found: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
            there.append(time.process_time() - began)
            return torch.zeros(len(found), dtype=torch.bool)

        began = time.process_time()
        found = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end[0],
            stopping_criteria=transformers.StoppingCriteriaList([noted]),
        )
        answers = [until_end(row[longest:].tolist(), end) for row in found]
        return {"tokens": answers, "times": [there[: len(a)] for a in answers]}

    return transformers.__version__, answer


if __name__ == "__main__":
    serve(load)
