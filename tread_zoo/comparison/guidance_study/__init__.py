"""Which guidance is best at equal network cost, for networks that are trained.

asked.py      what is compared: guidances with their scales, samplers
groups.py     the runs, those that differ in seed alone together
plan.py       as many steps as the budget pays, for each; what cannot be done, and why
records.py    sampling and scoring, one file a record, each done once
report.py     tables, results.csv, results.json
pictures.py   metrics against scale; samples of each guidance from the same seeds
study.py      all of it, in order
"""

from tread_zoo.comparison.guidance_study.records import Scoring
from tread_zoo.comparison.guidance_study.study import Study, compare_guidance, plan_study

__all__ = ["Scoring", "Study", "compare_guidance", "plan_study"]
