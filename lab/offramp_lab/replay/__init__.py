"""``offramp replay``: what would each tuning policy have done with these recorded scores?

command.py   the options, and the story of one run
load.py      records files
arrivals.py  ``--arrivals``: files and generators
measure.py   policies on the halves of a file, on draws, and behind a queue
report.py    JSON and tables
plots.py     pictures, the only part that needs matplotlib
"""
