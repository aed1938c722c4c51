"""A service's objects in words: the facts that the commands print and the web page shows, from one place.

Pure: no clock, no terminal, no markup. Times come as arguments, a fact is a sentence or a small value.

family.py    a service and what belongs to it, as one value
words.py     ages, shares, seconds
plans.py     a plan and its certificate; two plans compared
progress.py  what a service does, where a rollout stands, how attempts ended
health.py    is it healthy?
why.py       which plan serves and why; what a rollout's gates have seen, and what that means
capacity.py  what workers answer with exits off, against what is asked of them
pools.py     how many workers each pool has, and what they can do
latency.py   how long requests took with exits on and off
generation.py tokens per second with and without what makes generated answers cheaper
savings.py   what a plan was to save, and what it saves
network.py   the network as a line of blocks with its ramps
version.py   two versions of a model side by side
tones.py     good, bad or neither: the tone of a word that tells a state
"""
