"""Training: the run itself, what it is made of, checkpoints, its log.

loop.py         the run, read from top to bottom
setup.py        its parts, and their state on the devices
checkpoints.py  written beside and renamed, verified when read
ema.py          averaged weights
log.py          what a run prints and leaves in its folder
signals.py      saving and ending when a signal comes
optimizers.py, lr_schedules.py, trackers.py     registered parts
restore.py      from a checkpoint back to what samples and scores need
"""
