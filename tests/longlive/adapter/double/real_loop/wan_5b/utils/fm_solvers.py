"""Stands in for solvers that are not used here."""

FlowDPMSolverMultistepScheduler = get_sampling_sigmas = retrieve_timesteps = None
