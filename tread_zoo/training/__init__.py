"""Training: the loop, the parts of a run, and its log.

loop.py         the training loop, to read from top to bottom
step.py         a step's random draws, its loss, and its FLOPs
setup.py        the parts of a run, and their state on the devices
ema.py          averaged weights
log.py          what a run prints and writes to its folder
saving.py       what goes into a checkpoint
signals.py      saves and ends the run when a signal comes
optimizers.py, lr_schedules.py, trackers.py     registered parts
"""
