"""What a terminal shows of a service: the facts of `offramp_operator.explain` as lines; pure, and so without a clock or
a terminal.

lines.py     columns, trees, styles
plans.py     two plans side by side
tree.py      `get`
health.py    `status`
why.py       `why`
tables.py    `history` and `top`
fleet.py     `plan`
"""
