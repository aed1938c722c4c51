"""The documentation site: what is generated for it, how it is built, and how its links are checked.

reference.py   pages about the kinds, from the CRDs
values.py      the chart's values
reasons.py     every condition, reason and event that the code can emit
errors.py      the error tree
numbers.py     how many labels and audits things take
pictures.py    the drawings of the concepts
generate.py    writes (or checks) all of the above
build.py       builds the site
links.py       follows every link of what was built
"""
