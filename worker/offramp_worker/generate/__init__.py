"""Generative models: whole answers, token by token, under one seam between engines and doors.

accounts.py     what happened, counted in one place
answers.py      one answer as it grows from token to token
audits.py       greedy answers that are run to the reference after their reply
computing.py    tickets and the engine
desk.py         where requests for generation wait, are computed in turns and are audited
line.py         who waits and who is computed, and what that means for those who come
load.py         load a bundle for generation and trust none of it
metrics.py      Prometheus metrics of a worker that generates
plan_target.py  plans of a model that generates
requests.py     what clients ask for: bodies of OpenAI's API and of Triton's generate extension
routes.py       by which route a request is computed
seam.py         the seam between what generates and what serves it
serve.py        the process of a worker that generates
settings.py     settings of a worker that generates, beside `offramp_worker.settings`
tickets.py      a requested answer on its way through the desk
tokenizer.py    text to tokens and back by a bundle's `tokenizer.json` and `tokenizer_config.json`
worker.py       a worker that generates, as both ports see it
"""
