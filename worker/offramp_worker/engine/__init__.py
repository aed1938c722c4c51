"""The engine: sessions, batches, arms, exits, audits and what is counted. Knows no HTTP.

engine.py   takes turns: one batch, audit or probe at a time
in_turn.py  the same where engines share their executor
options.py  its settings, in one object
remains.py  what it leaves to the next engine of the same bundle
vitals.py   whether the executor still works

queue/      requests from the door to their answers
arms/       which plan a batch runs under, without threads
accounts/   what is counted, and what is kept of requests
execution/  what runs: graphs, stages, and who leaves where
"""
