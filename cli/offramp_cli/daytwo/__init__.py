"""Day two: commands that look at services and tell the operator what a person has decided.

session.py    the options that all of them share, output, and errors as one line
read.py       get, status, why, history, diff, top
decisions.py  what may be decided when: pure
write.py      promote, abort, pause, resume, approve, tune
pins.py       export, pin
lint.py       manifests, checked offline
rules.py      the CRDs' rules, evaluated as the API server does
"""
