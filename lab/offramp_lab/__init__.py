"""What judges the product and is no part of it: rivals' policies, a simulator of the queue, and `offramp replay`.

Nothing that decides, serves or operates imports it, and no image contains it.

stopping.py  when a test on counts stops
"""
