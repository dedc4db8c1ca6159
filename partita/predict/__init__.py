"""Predictions of a step: what will it cost, before it runs?

In reading order: machine, collective_time, kernel_time, timeline, simulate, calibrate, plan_space,
autoplan; explain and show stand beside them.
"""
