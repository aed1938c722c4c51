"""Exits of single tokens: rules of papers, replayed on recorded scores of tokens.

command.py  what ``offramp replay`` does with files of tokens
judged.py   what a rule saves and loses on answers that it has not seen
records.py  recorded scores of tokens, and what every threshold does to every answer
rules.py    which threshold a rule takes, by what it knows of answers
"""
