"""Requests from the door to their answers.

tickets.py    a request on its way through, and how one is refused
batcher.py    the queue, and the batches that are cut from it
relief.py     whether there is overload, and which requests have its budget
replies.py    rows answered as they leave
followers.py  requests that wait for another one's answer
cache.py      answers kept, and who waits with whom
deadlines.py  which rows cannot wait any longer
"""
