--------------------------------- MODULE MC ---------------------------------
(* Values that a .cfg file cannot write, and the situations that must be   *)
(* reachable: each Never... below is a claim that has to be refuted. Bounds *)
(* live in the .cfg files, never in Prefetch.tla.                          *)
EXTENDS Prefetch

One       == <<1>>
Twins     == <<1, 1>>
Strangers == <<1, 2>>
TwinsAndStranger == <<1, 1, 2>>
AllTwins  == <<1, 1, 1>>

Cold      == <<0>>
WarmBase  == <<1>>
ColdBoth  == <<0, 0>>
WarmBoth  == <<1, 1>>
WarmFirst == <<1, 0>>
ColdAndWarm == <<0, 1>>   \* pages of a prompt that nobody here asks for

Everything == EnvAll

-----------------------------------------------------------------------------
Moves(r, from, to) == st.ph[r] = from /\ st'.ph[r] = to

NeverDeferOut       == [][\A r \in Req : ~(Moves(r, "staged", "recomputing") /\ st.def[r] + 1 = DeferCap /\ st'.on)]_st
NeverParkOut        == [][\A r \in Req : ~(Moves(r, "parked", "recomputing") /\ st.chn[r] + 1 = ParkCap
                                           /\ Match(st, r) >= st.base[r] /\ st' = Drained(st))]_st
NeverQuarantine     == \A o \in st.ops : o.k = "read" => o.own = {}
NeverDeviceQuarantine == \A o \in st.ops : o.dq = 0
NeverBaseLost       == [][\A r \in Req : ~(Moves(r, "parked", "refetch") /\ Match(st, r) < st.base[r])]_st
NeverBypass         == st.byp = 0
NeverPartialHold    == \A r \in Req : st.ph[r] = "staged" => st.end[r] = L
NeverRetractLoading == \A o \in st.ops : o.k = "load" => st.ph[o.r] \notin Live \/ o.ep[1] = st.att[o.r]
NeverFailWithReaders == [][\A o \in st.ops : ~(o.k = "load" /\ o.deps = Req /\ st'.att[1] > st.att[1]
                                               /\ st'.att[2] > st.att[2])]_st
NeverCoveredHold    == [][\A r \in Req : ~Moves(r, "staged", "idle")]_st
NeverShrunkHold     == [][\A r \in Req : ~Moves(r, "staged", "refetch")]_st
NeverKeptAtDeadline == \A r \in Req : ~(st.ph[r] = "staged" /\ ~st.open[r] /\ st.on)
NeverLateHit        == \A o \in st.ops : o.k = "lookup" => IsOwn(st, o)
NeverHoldDetached   == \A r \in Req : st.ph[r] = "staged" => st.on
NeverClosedRestart  == [][\A r \in Req : ~Moves(r, "loading", "recomputing")]_st
NeverAssumed        == [][\A r \in Req : ~Moves(r, "refetch", "reading")]_st
NeverPolled         == [][\A r \in Req : ~Moves(r, "paced", "querying")]_st
NeverHeadPollDropped == [][\A r \in Req : ~(Moves(r, "paced", "idle") /\ st' = Retried(st))]_st
NeverCutKeepsPart   == [][\A r \in Req : ~(Moves(r, "reading", "staged") /\ st' = Consider(st, r))]_st
NeverWriteYields    == \A w \in Spans : st.spans[w].q = "queued" => (Wanted(st) = 0 \/ st.free = {} \/ WriteRoom(st) > 0)
NeverPinRefused     == st.why # "pin"
=============================================================================
