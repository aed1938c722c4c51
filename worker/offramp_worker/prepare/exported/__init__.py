"""Archives of ``torch.export`` from people we do not know.

``torch.export.load`` trusts what it reads: it evaluates symbolic expressions and guards as Python, puts names of inputs
into generated code, imports modules that the trees of inputs name, calls whatever an operator's name leads to,
unpickles, and loads compiled libraries. So nobody's archive is handed to it. :func:`checked_archive` reads one by a
grammar of its own (:mod:`archive`, :mod:`schema`, :mod:`expressions`, :mod:`operators`), and writes a new one that
holds what passed and nothing else; torch reads that.

archive.py      reading an archive of `torch.export` without believing it
expressions.py  symbolic expressions: read, never evaluated
operators.py    operators that a program may call
schema.py       the JSON documents of an archive
"""

from offramp_worker.prepare.exported.archive import checked_archive

__all__ = ["checked_archive"]
