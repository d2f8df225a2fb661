"""The files of a run.

metadata.py     a checkpoint's metadata and file names
checkpoint.py   checkpoints: saved atomically, verified when read
folder.py       the other files of a run, and how a run is resumed
init_from.py    a new run that starts from the weights of another
restore.py      what sampling and scoring need, loaded from a checkpoint
hub.py          single networks: saved, loaded, pushed
posthoc_ema.py  averaged weights of any width, computed from two tracked averages
"""
