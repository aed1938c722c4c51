"""How workers come to another bundle or image, and how many there are.

capacity.py  what workers answer with exits off, and how many it takes
pools.py     what the workers of each pool can do, and how requests are shared
pool_demand.py  what they are planned for: the recent past, and earlier days
pool_plan.py how many workers each pool is to have
class_shares.py what each service may have of a class that others use too
startup.py   how long a new worker takes until it answers
delivery.py  the bundle on its way to the workers
update.py    how workers come to another bundle or image
recreate.py  how the only worker is replaced where there is room for one
versions.py  two versions of a model side by side
pace.py      whose workers may be replaced now when all are to be
rejected.py  how long no further worker is asked for after nodes rejected some
rest.py      a service that nobody wants workers of
absent.py    a pass without workers that have reported their model
"""
