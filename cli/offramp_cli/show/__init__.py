"""Objects to lines for people and to plain values for machines; pure, and so without a clock or a terminal.

lines.py     columns, trees, ages, shares, styles
plans.py     a plan and its certificate in words; two plans side by side
tree.py      `get`
health.py    `status`
why.py       `why`
tables.py    `history` and `top`
"""
