"""What pieces cost, and what plans could save.

profiling.py  what the backbone's segments, the heads and regrouping cost on this machine
pricing.py    the backbone's segments and the heads as a worker runs them
executors.py  the whole backbone on every executor at hand, timed
outlook.py    what plans could save on a new bundle's records
"""
