"""What Offramp does on a GPU: ``make bench-gpu``, with a software GPU where there is no other.

models.py    ViT-B and ResNet-50 at their real sizes, made here
bundles.py   a bundle of one of them, with heads of random weights
timing.py    times of whole models and of plans
serving.py   a worker process under load, and one whose GPU has no room
pack.py      what is needed on a machine without a network, in one file
__main__.py  all of it, as JSON and as a page
"""
