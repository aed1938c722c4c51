"""Bring a bundle from where it is kept to a folder: over HTTPS, or from an S3-compatible store.

command.py   `offramp-worker fetch URI`: what a pod runs before its worker
download.py  one file over HTTP, in as many connections as it takes
fetch.py     from a URI to a verified bundle in a folder
network.py   connections to addresses that a bundle may come from, and to no others
source.py    where a bundle comes from, and with which credentials
unpack.py    unpack an archive from a stranger
"""
