"""A cluster as a platform: reads from the cache, writes by server-side apply, and only where something differs.

:mod:`service_platform` puts the rooms together. :mod:`fleet`, :mod:`classes`, :mod:`templates`, :mod:`plans`
and :mod:`trainings` read; :mod:`workers`, :mod:`gateway`, :mod:`trainings`, :mod:`statuses`, :mod:`plans`
and :mod:`events` write, through :mod:`children` where an object may be somebody else's or may have
changed. :mod:`memory` is what lies between two passes.
"""
