"""Where the day-two commands read a service and its plans, and how they write what people may write.

source.py    the interface, and which of the two implementations a command line means
cluster.py   the API server of a Kubernetes cluster
folder.py    the state folder of `offramp up`
"""
