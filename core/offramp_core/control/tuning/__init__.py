"""When plans are looked for and ramps are trained, and what is proposed.

tuner.py       when to tune, and how many labels to ask for
retraining.py  when to train ramps on live traffic, and what becomes of a new ramp set
proposals.py   what tuner and pin propose, and the audits they need
"""
