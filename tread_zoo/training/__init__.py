"""Training: the run itself, what it is made of, its log.

loop.py         the run, read from top to bottom
setup.py        its parts, and their state on the devices
ema.py          averaged weights
log.py          what a run prints and leaves in its folder
saving.py       what goes into a checkpoint
signals.py      saving and ending when a signal comes
optimizers.py, lr_schedules.py, trackers.py     registered parts
"""
