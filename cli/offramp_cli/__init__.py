"""The command line: thin commands over the packages that do the work.

documents.py         YAML as users write it, read with bounds
edge.py              what makes `offramp serve` and `offramp up` an edge box or a core
examples.py          examples in a command's help
fetched.py           bundles that `offramp up` fetches, by the code that workers use
kubectl_complete.py  what kubectl runs to complete `kubectl offramp` in a shell
main.py              entry point of `offramp` and `kubectl offramp`
manifest.py          read an `EarlyExitService` from a YAML file
npz.py               arrays from npz files; nothing in them is unpickled
plan.py              `offramp plan FILE`: which plans should serve where, from figures in a file
prepare.py           `offramp prepare`: turn a model and unlabeled inputs into an exit bundle
replay.py            `offramp replay`: what tuning policies would have done with recorded scores
serve.py             `offramp serve DIR`: one worker in the foreground
triton.py            `offramp triton DIR`: a plan's exits as one graph that Triton serves
up.py                `offramp up FILE`: serve an EarlyExitService on this machine
verify.py            `offramp verify`: checks a certificate
"""
