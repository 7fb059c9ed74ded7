"""Discrete events on a virtual clock: what would have happened, with the production controller inside. Pure, no I/O.

The world (`world`, `link`, `engine`) is written apart from the controller's cost model and shares no formula with it;
`tests/sim` compares the two. In the order of use:

    codecs = {p.arm_id: CodecTruth.of(p) for p in profiles}
    world = World(codecs=codecs, link=LinkTruth(schedule=RateSchedule.constant(12.5e6)))
    arrivals = generate([TrafficClass(median_bytes=14e6)], count=400, gap_s=2.0, seed=1)
    run = simulate(world, arrivals, ProductionController(request), seed=1)
    best = simulate(world, arrivals, Oracle(world, Menu.of(request)), seed=1)
    regret(run, best)                                     # 0.03: 3 % more seconds than the oracle
    regret(run, best, (0, 50))                            # by range of arrivals
    run.to_document()                                     # every transfer, JSON-ready

`schedule.RateSchedule`: steps and ramps by time, steps by transfers begun. `schedule.Drift`: an arm's codec is k times
as slow (or its loss as large) from a moment on. `arrivals.generate`: Poisson arrivals of classes, tenants and sizes,
with shifts of the mix; `gap_for_load` turns a load into a gap; `one_after_another` goes with `in_flight=1`. `traces`:
Azure and Mooncake. `queues`: a peer's queue; `controld.contract.fair_queue.FairQueue` fits (`new_queue=`). Deciders:
`deciders.fixed.StaticArm`, `deciders.kvserve.KVServeController`, `deciders.oracle.Oracle`,
`deciders.production.ProductionController`; `deciders.base.Menu.of(request)` says which arms a class may use. `metrics`:
regret, slowdown, Jain's index, percentiles. Equal seeds give every decider the same arrivals and the n-th transfer the
same noise, so runs are compared pair by pair.
"""
