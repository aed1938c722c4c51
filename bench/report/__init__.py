"""docs/benchmarks.md from the JSON files of the bench: ``python -m bench.report``. No figure in the page is typed by
hand.

results.py    the files under build/bench, and the words for one that is missing
goals.py      the targets, row by row: goal, measured, how
papers.py     the seed papers' own figures, and ours beside them
pictures.py   the plots under docs/images/bench
page.py       the page
"""
