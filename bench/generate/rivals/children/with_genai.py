"""onnxruntime-genai's generator, prompts of a group in one batch; threads stand in its configuration."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import onnxruntime_genai as genai
from lines import Answering, serve, until_end


def load(folder: str) -> tuple[str, Answering]:
    model = genai.Model(folder)

    def answer(prompts: list[list[int]], tokens: int, end: list[int]) -> dict[str, Any]:
        longest = max(map(len, prompts))
        ids = np.array([p + [end[0]] * (longest - len(p)) for p in prompts], dtype=np.int32)
        began, there = time.process_time(), list[float]()
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(batch_size=len(prompts), max_length=longest + tokens, do_sample=False)
        generator = genai.Generator(model, parameters)
        generator.append_tokens(ids if len(prompts) > 1 else ids[0])
        while not generator.is_done():
            generator.generate_next_token()
            there.append(time.process_time() - began)
        found = [list(map(int, generator.get_sequence(i)[longest:])) for i in range(len(prompts))]
        answers = [until_end(row, end) for row in found]
        return {"tokens": answers, "times": [there[: len(a)] for a in answers]}

    return genai.__version__, answer


if __name__ == "__main__":
    serve(load)
