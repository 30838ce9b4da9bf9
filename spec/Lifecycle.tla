------------------------------ MODULE Lifecycle ------------------------------
(***************************************************************************)
(* The life of one request, attempt after attempt, as its log shows it.    *)
(* Written by hand from the prose of the design, not from the table: that  *)
(* both agree is checked (`tests/test_spec.py` compares every step, and    *)
(* Trace.tla every line of real logs).                                     *)
(*                                                                         *)
(* The state is one record; After(s, event, n) is the set of states that   *)
(* `event` with argument n may lead to: empty if it may not happen.        *)
(***************************************************************************)
EXTENDS Naturals

VARIABLE st

Queued   == {"idle", "paced", "refetch"}
Timed    == {"querying", "reading", "parked"}
Waiting  == Queued \cup Timed \cup {"staged", "recomputing"}
Admitted == {"loading", "resident", "transferring"}
Live     == Waiting \cup Admitted

(* caps: retry, poll, interval, defer, park                                *)
First(caps) == [caps |-> caps, ph |-> "idle", att |-> 1, ret |-> 0, dfr |-> 0, chn |-> 0, open |-> TRUE,
                fresh |-> TRUE, last |-> "none"]

To(s, phase)     == {[s EXCEPT !.ph = phase]}
Closed(s, phase) == {[s EXCEPT !.ph = phase, !.open = FALSE]}

MayPoll(s)    == s.caps.interval > 0 /\ s.ret < s.caps.poll
MayRefetch(s) == s.open /\ s.ret < s.caps.retry /\ s.chn + 1 < s.caps.park

Poll(s)    == IF MayPoll(s) THEN To(s, "paced") ELSE To(s, "idle")
Refetch(s) == IF MayRefetch(s) THEN To(s, "refetch") ELSE Closed(s, "recomputing")
Chance(s)  == [s EXCEPT !.chn = @ + 1]

Lookup(s, n) ==
    IF s.ph = "idle" /\ s.fresh /\ s.open THEN To(s, "querying")
    ELSE IF s.ph \in {"paced", "refetch"} /\ s.ret < s.caps.retry THEN To([s EXCEPT !.ret = @ + 1], "querying")
    ELSE {}
Miss(s, n)  == IF s.ph = "querying" THEN Poll(s) ELSE {}
Grant(s, n) == IF s.ph \in {"querying", "parked"} THEN To(s, "reading") ELSE {}
Park(s, n)  == IF s.ph = "querying" THEN To(s, "parked") ELSE {}
Refused(s, n) ==
    IF s.ph # "parked" THEN {}
    ELSE IF s.chn + 1 < s.caps.park THEN {Chance(s)} ELSE Closed(s, "recomputing")
BaseLost(s, n)   == IF s.ph \in {"querying", "parked"} THEN Refetch(s) ELSE {}
Covered(s, n)    == IF s.ph \in {"querying", "parked", "staged"} THEN To(s, "idle") ELSE {}
Unservable(s, n) == IF s.ph \in {"querying", "parked"} THEN Closed(s, "recomputing") ELSE {}
ReadDone(s, n)   == IF s.ph = "reading" THEN To(s, IF n > 0 THEN "staged" ELSE "idle") ELSE {}
Cut(s, n) ==
    CASE s.ph = "querying" -> Poll(s)
      [] s.ph = "parked"   -> Refetch(s)
      [] s.ph = "reading"  -> To(s, IF n > 0 THEN "staged" ELSE "idle")
      [] OTHER             -> {}
Deadline(s, n) ==
    CASE s.ph \in {"querying", "parked"} -> Closed(s, "recomputing")
      [] s.ph = "reading"                -> Closed(s, IF n > 0 THEN "staged" ELSE "recomputing")
      [] OTHER                           -> {}
Head(s, n)     == IF s.ph = "paced" THEN To(s, "idle") ELSE {}
Declined(s, n) == IF s.ph \in {"paced", "refetch"} THEN To(s, "idle") ELSE {}
Shrank(s, n) ==
    CASE s.ph \in {"idle", "paced"} /\ s.open ->
            IF MayRefetch(s) THEN To(Chance(s), "refetch") ELSE Closed(s, "recomputing")
      [] s.ph = "staged" -> Refetch(s)
      [] OTHER           -> {}
Defer(s, n) ==
    IF s.ph # "staged" THEN {}
    ELSE IF s.dfr + 1 < s.caps.defer THEN {[s EXCEPT !.dfr = @ + 1]} ELSE Closed(s, "recomputing")
Admit(s, n) ==
    CASE s.ph = "staged" -> IF n > 0 THEN To(s, "loading") ELSE {}
      [] s.ph \in {"idle", "paced", "recomputing"} -> To(s, "resident")
      [] OTHER -> {}
LoadAck(s, n)  == IF s.ph = "loading" THEN To(s, "resident") ELSE {}
Transfer(s, n) == IF s.ph = "resident" THEN To(s, "transferring") ELSE {}
Close(s, n) ==
    CASE s.ph = "staged" -> Closed(s, "staged")
      [] s.ph \in Queued \cup Timed -> Closed(s, "recomputing")
      [] OTHER -> {}

Finish(s, n)     == IF s.ph \in Admitted THEN To(s, "finished") ELSE {}
LoadFailed(s, n) == IF s.ph \in Admitted THEN To(s, "aborted") ELSE {}
Yield(s, n)      == IF s.ph \in Admitted THEN To(s, "aborted") ELSE {}
Reject(s, n)     == IF s.ph \in Waiting THEN To(s, "aborted") ELSE {}
Abort(s, n)      == IF s.ph \in Live THEN To(s, "aborted") ELSE {}
Retract(s, n)    == IF s.ph \in Live THEN To(s, "aborted") ELSE {}
Flush(s, n)      == IF s.ph \in Live THEN To(s, "aborted") ELSE {}

(* `exhausted` is absent: a retry is armed only below the cap.             *)
After(s, event, n) ==
    {[t EXCEPT !.fresh = FALSE, !.last = event] : t \in
        CASE event = "lookup" -> Lookup(s, n)         [] event = "miss" -> Miss(s, n)
          [] event = "grant" -> Grant(s, n)           [] event = "park" -> Park(s, n)
          [] event = "refused" -> Refused(s, n)       [] event = "base_lost" -> BaseLost(s, n)
          [] event = "covered" -> Covered(s, n)       [] event = "unservable" -> Unservable(s, n)
          [] event = "read_done" -> ReadDone(s, n)    [] event = "cut" -> Cut(s, n)
          [] event = "deadline" -> Deadline(s, n)     [] event = "head" -> Head(s, n)
          [] event = "declined" -> Declined(s, n)     [] event = "shrank" -> Shrank(s, n)
          [] event = "defer" -> Defer(s, n)           [] event = "admit" -> Admit(s, n)
          [] event = "load_ack" -> LoadAck(s, n)      [] event = "transfer" -> Transfer(s, n)
          [] event = "close" -> Close(s, n)           [] event = "finish" -> Finish(s, n)
          [] event = "load_failed" -> LoadFailed(s, n) [] event = "yield" -> Yield(s, n)
          [] event = "reject" -> Reject(s, n)         [] event = "abort" -> Abort(s, n)
          [] event = "retract" -> Retract(s, n)       [] event = "flush" -> Flush(s, n)
          [] OTHER -> {}}

Events == {"lookup", "miss", "grant", "park", "refused", "base_lost", "covered", "unservable", "read_done", "cut",
           "deadline", "head", "declined", "shrank", "defer", "admit", "load_ack", "transfer", "close", "finish",
           "load_failed", "yield", "reject", "abort", "retract", "flush"}

(* A replaced attempt goes on as a new one. A retraction starts the retry  *)
(* count again; a failed load costs a retry.                               *)
GoesOn(s)    == s.ph = "aborted" /\ s.last \in {"retract", "flush", "load_failed", "yield"}
Restarted(s) ==
    LET n == IF s.last = "retract" THEN 0 ELSE IF s.last = "load_failed" THEN s.ret + 1 ELSE s.ret IN
    [First(s.caps) EXCEPT !.att = s.att + 1, !.ret = IF n > s.caps.retry THEN s.caps.retry ELSE n]

-----------------------------------------------------------------------------
(* On its own it is checked for small caps, over one attempt.              *)

CapSets == [retry : 0..1, poll : {1}, interval : 0..1, defer : 1..2, park : 1..2]
Init == \E caps \in CapSets : st = First([caps EXCEPT !.poll = caps.retry - (caps.retry \div 2)])
Next == \E event \in Events, n \in 0..1 : st' \in After(st, event, n)
Spec == Init /\ [][Next]_st

CapsHold == st.ret <= st.caps.retry /\ st.dfr < st.caps.defer /\ st.chn < st.caps.park
ClosedIsClosed == ~st.open => st.ph \notin Timed \cup {"paced", "refetch"}
=============================================================================
