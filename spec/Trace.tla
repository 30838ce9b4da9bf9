-------------------------------- MODULE Trace --------------------------------
(***************************************************************************)
(* Are logs of real runs behaviours of Lifecycle? TraceData is generated   *)
(* by `spec/traces.py`: Traces is a sequence of lives, each with the caps  *)
(* of its run and its lines <<event, argument, attempt, state after>>.     *)
(* All lives are checked in one run: k is the life, l the next line. A     *)
(* line that no step of Lifecycle explains is a deadlock at (k, l).        *)
(***************************************************************************)
EXTENDS Lifecycle, Sequences, TraceData

VARIABLES k, l

TInit == k \in 1..Len(Traces) /\ l = 1 /\ st = First(Traces[k].caps)

Line == Traces[k].lines[l]
Begun == IF Line[3] = st.att + 1 /\ GoesOn(st) THEN Restarted(st) ELSE st

TStep == /\ l <= Len(Traces[k].lines)
         /\ Begun.att = Line[3]
         /\ st' \in After(Begun, Line[1], Line[2])
         /\ st'.ph = Line[4]
         /\ l' = l + 1 /\ UNCHANGED k
TDone == l > Len(Traces[k].lines) /\ UNCHANGED <<st, k, l>>

TSpec == TInit /\ [][TStep \/ TDone]_<<st, k, l>>
=============================================================================
