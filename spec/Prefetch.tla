------------------------------ MODULE Prefetch ------------------------------
(***************************************************************************)
(* The load path of the cache, over N requests and shared resources.       *)
(*                                                                         *)
(* The whole state is one record, `st`. An operator such as Grant(s, r)    *)
(* takes a state and gives the next one, so that the compound steps of the *)
(* control plane (an answer that parks or grants, a drain that serves      *)
(* several hits, a failed load that restarts all its readers) are plain    *)
(* composition. The actions at the end are what a schedule is made of.     *)
(* They are the parts of one pass, taken apart: the real pass runs them in *)
(* a fixed order, here they come in any order.                             *)
(*                                                                         *)
(* Left out, with the reason: page keys being hashed (a request without    *)
(* keys owns and waits for nothing of ours), flush (every request is       *)
(* retracted and the tree emptied: both are here), prefill disaggregation  *)
(* (`transferring` owns what `resident` owns), Lost (for us the same as an *)
(* answer with what had landed), output tokens (an admitted request owns   *)
(* one page beyond its prompt).                                            *)
(***************************************************************************)
EXTENDS Naturals, Integers, Sequences, FiniteSets

CONSTANTS
    N,          \* requests; they arrive in the order of their numbers
    ChainOf,    \* <<chain of request 1, ...>>: requests of a chain have the same prompt
    Warm,       \* <<pages of chain 1 that are on the device at first, ...>>
    L,          \* whole pages of a prompt; a request needs L + 1 device pages
    S,          \* staging rows
    ReadLimit,  \* rows that reads may hold together
    D,          \* device pages
    PinCap,     \* pages that holds may pin
    Threshold,  \* fewest pages worth a look-up
    RetryCap, Interval, DeferCap, ParkCap, BypassCap,
    BestEffort, \* whether the scheduler cuts waits when it reaches a request
    Retracts,   \* how often requests may be retracted, all together
    Writes,     \* write spans of one page
    WriteFloor, WriteMargin,
    Env         \* what the outside may do: a subset of EnvAll

EnvAll == {"abort", "retract", "detach", "evict", "partial", "progress", "miss", "loadfail", "writefail", "defer",
           "deadline"}
ASSUME Env \subseteq EnvAll /\ PinCap <= D - (L + 1) /\ Len(ChainOf) = N

VARIABLE st

Req    == 1..N
Chains == 1..Len(Warm)
Rows   == 1..S
Spans  == 1..Writes
NoLoad == <<0, 0, 0>>
NoData == <<0, 0>>

Timed      == {"querying", "reading", "parked"}
Queued     == {"idle", "paced", "refetch"}
Waiting    == Timed \cup Queued \cup {"staged", "recomputing"}
Admitted   == {"loading", "resident"}
Live       == Waiting \cup Admitted
Candidates == {"idle", "paced", "staged", "recomputing"}

-----------------------------------------------------------------------------
(* Small helpers *)

Max(a, b) == IF a > b THEN a ELSE b
Min(a, b) == IF a < b THEN a ELSE b
MaxOf(A)  == CHOOSE x \in A : \A y \in A : y <= x
MinOf(A)  == CHOOSE x \in A : \A y \in A : x <= y
Range(q)  == {q[i] : i \in 1..Len(q)}
First(q, n) == SubSeq(q, 1, n)
Last(q, n)  == SubSeq(q, Len(q) - n + 1, Len(q))
Without(q, x) == SelectSeq(q, LAMBDA y : y # x)

RECURSIVE Lowest(_, _)
Lowest(A, n) == IF n = 0 THEN <<>> ELSE LET x == MinOf(A) IN <<x>> \o Lowest(A \ {x}, n - 1)

RECURSIVE Total(_, _)
Total(f, A) == IF A = {} THEN 0 ELSE LET x == CHOOSE x \in A : TRUE IN f[x] + Total(f, A \ {x})

-----------------------------------------------------------------------------
(* Operations. `rows` may be touched from `got` on; `own` are rows that    *)
(* belong to the operation because its attempt has left or because it is a *)
(* load; a load holds the device pages (a, b] in the tree under its lock,  *)
(* or, once they were withdrawn, `dq` pages in quarantine.                 *)

Op(k, s, r) == [k |-> k, r |-> r, ep |-> <<s.att[r], s.ret[r]>>, n |-> 0, rows |-> <<>>, got |-> 0, own |-> {},
                a |-> 0, b |-> 0, lock |-> FALSE, dq |-> 0, deps |-> {}]
LoadId(o)  == <<o.r, o.ep[1], o.ep[2]>>
KindOf     == [querying |-> "lookup", reading |-> "read", loading |-> "load"]
IsOwn(s, o) == /\ o.ep = <<s.att[o.r], s.ret[o.r]>>
               /\ s.ph[o.r] \in DOMAIN KindOf /\ KindOf[s.ph[o.r]] = o.k
OwnOp(s, r) == CHOOSE o \in s.ops : o.r = r /\ IsOwn(s, o)
Touched(o)  == {o.rows[i] : i \in (o.got + 1)..Len(o.rows)}

(* Device: a chain is a sequence of pages, each marked with the load that  *)
(* it waits for. Locks are those of the ledgers, so they are derived.      *)

Match(s, r) == Len(s.tree[ChainOf[r]])
Locked(s, c) ==
    MaxOf({0} \cup {s.pin[r]  : r \in {r \in Req : ChainOf[r] = c}}
              \cup {s.lock[r] : r \in {r \in Req : ChainOf[r] = c}}
              \cup {o.b : o \in {o \in s.ops : o.k = "load" /\ o.lock /\ ChainOf[o.r] = c}}
              \cup {s.spans[w].p : w \in {w \in Spans : s.spans[w].q = "copying" /\ s.spans[w].c = c}})
(* Waiting requests notice what others bring: if it leaves again, it is    *)
(* worth a look-up.                                                        *)
Notice(s, c) == [s EXCEPT !.rel = [r \in Req |->
    IF ChainOf[r] = c /\ s.ph[r] \in Waiting \ {"recomputing"} /\ @[r] >= 0 /\ @[r] < Len(s.tree[c])
    THEN Len(s.tree[c]) ELSE @[r]]]
LoadsIn(s, c, from, to) == {s.tree[c][i] : i \in (from + 1)..to} \ {NoLoad}
Truncate(s, c, n) == [s EXCEPT !.tree[c] = First(@, n)]

(* Staging *)

SpanRows(s)  == {w \in Spans : s.spans[w].q \in {"copying", "storing"}}
ReadsHold(s) == S - Cardinality(s.free) - Cardinality(SpanRows(s))
GiveRows(s, R) == IF R = {} THEN s ELSE
    [s EXCEPT !.free = @ \cup R, !.news = TRUE, !.data = [x \in Rows |-> IF x \in R THEN NoData ELSE @[x]]]
Unpin(s, r) == IF s.pin[r] = 0 THEN s ELSE [s EXCEPT !.pinned = @ - s.pin[r], !.pin[r] = 0, !.news = TRUE]
ReturnHold(s, r) == Unpin(GiveRows([s EXCEPT !.hold[r] = <<>>], Range(s.hold[r])), r)

-----------------------------------------------------------------------------
(* Moves of one attempt. `To` forgets what its new state has no use for.   *)

To(s, r, phase) ==
    [s EXCEPT !.ph[r] = phase,
              !.pace[r] = IF phase = "paced" THEN Interval + 1 ELSE 0,
              !.base[r] = IF phase \in Timed \cup {"staged"} THEN @ ELSE 0,
              !.end[r]  = IF phase \in (Waiting \ {"recomputing"}) THEN @ ELSE 0,
              !.rel[r]  = IF phase \in (Waiting \ {"recomputing"}) THEN @ ELSE 0]

LeaveParked(s, r) ==
    IF r \notin Range(s.parked) THEN s ELSE
    LET left == [s EXCEPT !.parked = Without(@, r)] IN
    IF Head(s.parked) # r THEN left
    ELSE [left EXCEPT !.why = "none", !.news = TRUE, !.byp = 0, !.tried = 0]

Close(s, r) == [To(LeaveParked(s, r), r, "recomputing") EXCEPT !.open[r] = FALSE]

(* The attempt leaves its running operation: what a read may still touch   *)
(* stays with the read.                                                    *)
Orphan(s, r) ==
    IF s.ph[r] # "reading" THEN s ELSE
    LET o == OwnOp(s, r) IN
    [s EXCEPT !.ops = (@ \ {o}) \cup {[o EXCEPT !.own = Touched(o)]}, !.hold[r] = First(@, o.got)]

(* Half of the retries (at least one) may be spent on speculation.         *)
MayPoll(s, r)    == Interval > 0 /\ s.ret[r] < RetryCap - (RetryCap \div 2)
MayRefetch(s, r) == s.open[r] /\ s.ret[r] < RetryCap /\ s.chn[r] + 1 < ParkCap

Miss(s, r)     == To(s, r, IF MayPoll(s, r) THEN "paced" ELSE "idle")
BaseLost(s, r) == IF MayRefetch(s, r) THEN To(LeaveParked(s, r), r, "refetch") ELSE Close(s, r)
Covered(s, r)  == To(LeaveParked(ReturnHold([s EXCEPT !.rel[r] = Match(s, r)], r), r), r, "idle")
Shrank(s, r)   ==
    LET back == ReturnHold(s, r) IN
    IF ~MayRefetch(s, r) THEN Close(back, r)
    ELSE To([back EXCEPT !.chn[r] = IF s.ph[r] = "staged" THEN @ ELSE @ + 1], r, "refetch")

-----------------------------------------------------------------------------
(* Commit: base, cover, pin, rows; all or nothing. Gives the next state    *)
(* and why the hit was refused ("none": it was not).                       *)

Pinnable(s, r) == Match(s, r) > 0 /\ Match(s, r) <= PinCap

Granted(s, r) ==
    LET m    == Match(s, r)
        rows == Lowest(s.free, s.end[r] - m)
        pin  == IF Pinnable(s, r) THEN m ELSE 0
        t    == To(LeaveParked(s, r), r, "reading")
        u    == [t EXCEPT !.free = @ \ Range(rows), !.hold[r] = rows, !.base[r] = m, !.pin[r] = pin,
                          !.pinned = @ + pin]
    IN [u EXCEPT !.ops = @ \cup {[Op("read", u, r) EXCEPT !.rows = rows]}]

Commit(s, r) ==
    LET m == Match(s, r)
        n == s.end[r] - m
    IN IF ReadLimit < Threshold THEN [s |-> Close(s, r), no |-> "none"]   \* can never be served
       ELSE IF m < s.base[r] THEN [s |-> BaseLost(s, r), no |-> "none"]
       ELSE IF m >= s.end[r] THEN [s |-> Covered(s, r), no |-> "none"]
       ELSE IF Pinnable(s, r) /\ s.pinned + m > PinCap THEN [s |-> s, no |-> "pin"]
       ELSE IF ReadsHold(s) + n > ReadLimit \/ n > Cardinality(s.free) THEN [s |-> s, no |-> "staging"]
       ELSE [s |-> Granted(s, r), no |-> "none"]

Refused(s, no) == [s EXCEPT !.why = no, !.news = FALSE, !.tried = Match(s, Head(s.parked))]
Park(s, r, no) ==
    LET t == To([s EXCEPT !.parked = Append(@, r)], r, "parked") IN
    IF Head(t.parked) = r THEN Refused(t, no) ELSE t

MayBypass(s)  == s.why = "pin" /\ s.byp < BypassCap
MayPass(s, r) == MayBypass(s) /\ ~Pinnable(s, r)

(* A published look-up: h leading pages beyond the base are stored.        *)
Hit(s, r, h) ==
    IF h < Threshold THEN Miss([s EXCEPT !.end[r] = 0], r) ELSE
    LET t == [s EXCEPT !.end[r] = s.base[r] + Min(h, ReadLimit)]
        c == Commit(t, r)
    IN IF t.parked # <<>> /\ ~MayPass(t, r) THEN Park(t, r, "staging")
       ELSE IF c.no # "none" THEN Park(t, r, c.no)
       ELSE IF t.parked # <<>> /\ c.s.ph[r] = "reading" THEN [c.s EXCEPT !.byp = @ + 1]
       ELSE c.s

(* Ask storage; a known end is taken up without asking. `again` is 1 for a *)
(* retry, which is counted only if something is really asked.              *)
Issue(s, r, known, again) ==
    LET m       == Match(s, r)
        assumed == m < known /\ known <= L
        end     == IF assumed THEN known ELSE L
        t       == [s EXCEPT !.rel[r] = m]
        u       == To([t EXCEPT !.base[r] = m, !.end[r] = IF assumed THEN known ELSE 0, !.ret[r] = @ + again],
                      r, "querying")
    IN IF end - m < Threshold THEN (IF s.ph[r] \in {"paced", "refetch"} THEN To(t, r, "idle") ELSE t)
       ELSE IF assumed THEN Hit(u, r, end - m)
       ELSE [u EXCEPT !.ops = @ \cup {[Op("lookup", u, r) EXCEPT !.n = L - m]}]

-----------------------------------------------------------------------------
(* Attempts begin and end *)

Fresh(s, r, retries, closed) ==
    [s EXCEPT !.ph[r] = "idle", !.att[r] = @ + 1, !.ret[r] = retries, !.def[r] = 0, !.chn[r] = 0, !.open[r] = ~closed,
              !.base[r] = 0, !.end[r] = 0, !.rel[r] = -1, !.pace[r] = 0]
Open(s, r, retries, closed) ==
    IF closed \/ ~s.on THEN Close(Fresh(s, r, retries, TRUE), r) ELSE Issue(Fresh(s, r, retries, FALSE), r, 0, 0)

(* Everything owned returns or passes to the operation that touches it.    *)
End(s, r) ==
    LET t == ReturnHold(LeaveParked(Orphan(s, r), r), r)
        u == [t EXCEPT !.dfree = @ + t.own[r], !.own[r] = 0, !.lock[r] = 0,
                       !.ops = {[o EXCEPT !.deps = @ \ {r}] : o \in t.ops}]
    IN [To(u, r, "gone") EXCEPT !.ret[r] = 0, !.def[r] = 0, !.chn[r] = 0, !.open[r] = FALSE]

Restart(s, r) == LET n == s.ret[r] + 1 IN Open(End(s, r), r, Min(n, RetryCap), n > RetryCap)

RECURSIVE RestartAll(_, _, _)
RestartAll(s, A, ret) ==
    IF A = {} THEN s ELSE
    LET r == MinOf(A)
        n == ret[r] + 1
    IN RestartAll(Open(s, r, Min(n, RetryCap), n > RetryCap), A \ {r}, ret)

RECURSIVE EndAll(_, _)
EndAll(s, A) == IF A = {} THEN s ELSE LET r == MinOf(A) IN EndAll(End(s, r), A \ {r})

-----------------------------------------------------------------------------
(* What the scheduler's look at a request settles                          *)

Cut(s, r) ==
    CASE s.ph[r] = "querying" -> To(s, r, IF MayPoll(s, r) THEN "paced" ELSE "idle")
      [] s.ph[r] = "parked"   -> IF MayRefetch(s, r) THEN To(LeaveParked(s, r), r, "refetch") ELSE Close(s, r)
      [] s.ph[r] = "reading"  ->
            LET o == OwnOp(s, r)
                t == Orphan(s, r)
            IN IF o.got > 0 THEN To([t EXCEPT !.end[r] = s.base[r] + o.got], r, "staged")
               ELSE To(ReturnHold(t, r), r, "idle")
      [] OTHER -> s

Deadline(s, r) ==
    CASE s.ph[r] = "reading" ->
            LET o == OwnOp(s, r)
                t == Orphan(s, r)
            IN IF o.got > 0
               THEN [To([t EXCEPT !.end[r] = s.base[r] + o.got], r, "staged") EXCEPT !.open[r] = FALSE]
               ELSE Close(ReturnHold(t, r), r)
      [] OTHER -> Close(s, r)

Plan(s, r) ==
    IF s.ph[r] # "staged" THEN s
    ELSE IF Match(s, r) >= s.end[r] THEN Covered(s, r)
    ELSE IF Match(s, r) < s.base[r] THEN Shrank(s, r)
    ELSE s

Consider(s, r) ==
    LET t == Plan(IF BestEffort THEN Cut(s, r) ELSE s, r)
        m == Match(t, r)
    IN IF t.ph[r] \notin {"idle", "paced"} \/ m >= t.rel[r] THEN t
       ELSE IF L - m >= Threshold /\ t.on /\ t.open[r] THEN Shrank(t, r)
       ELSE [t EXCEPT !.rel[r] = m]

Ready(s, r) == s.ph[r] \in Candidates \/ (BestEffort /\ s.ph[r] \in Timed)
Settled(s, r) == s.ph[r] \in Candidates /\ Consider(s, r) = s

-----------------------------------------------------------------------------
(* Admission. Eviction takes unlocked pages from the ends of chains, in    *)
(* any order of chains.                                                    *)

Evictable(s, c) == Len(s.tree[c]) - Locked(s, c)

RECURSIVE Evicted(_, _)
Evicted(s, n) ==
    IF n <= 0 THEN {s} ELSE
    UNION {Evicted(Truncate(s, c, Len(s.tree[c]) - 1), n - 1) : c \in {c \in Chains : Evictable(s, c) > 0}}

Depend(s, r, ids) == [s EXCEPT !.ops = {IF LoadId(o) \in ids /\ o.k = "load" THEN [o EXCEPT !.deps = @ \cup {r}] ELSE o
                                        : o \in @}]

(* The set of states in which r has been admitted; empty without room.     *)
AdmitStates(s, r) ==
    LET c    == ChainOf[r]
        m    == Match(s, r)
        load == IF s.ph[r] = "staged" THEN s.end[r] - m ELSE 0
        want == L + 1 - m
        held == [s EXCEPT !.lock[r] = m]
        take(t) == [t EXCEPT !.dfree = (@ + Max(0, want - s.dfree)) - want]
        go(t) ==
            IF load = 0
            THEN To([t EXCEPT !.own[r] = want], r, "resident")
            ELSE LET rows == Last(s.hold[r], load)
                     o    == [Op("load", t, r) EXCEPT !.rows = rows, !.own = Range(rows), !.a = m, !.b = s.end[r],
                                                      !.lock = TRUE]
                     u    == [t EXCEPT !.hold[r] = First(@, Len(@) - load), !.ops = @ \cup {o},
                                       !.tree[c] = @ \o [i \in 1..load |-> LoadId(o)],
                                       !.own[r] = want - load, !.lock[r] = s.end[r]]
                 IN To(ReturnHold(u, r), r, "loading")
    IN {LET u == Notice(go(take(t)), c) IN Depend(u, r, LoadsIn(u, c, 0, u.lock[r])) : t \in Evicted(held, want - s.dfree)}

Publish(s, r) ==
    LET c     == ChainOf[r]
        start == s.lock[r]
        have  == Len(s.tree[c])
        t     == [s EXCEPT !.tree[c] = @ \o [i \in 1..(L - have) |-> NoLoad], !.lock[r] = L,
                           !.own[r] = @ - (L - start), !.dfree = @ + (have - start)]
    IN Depend(Notice(t, c), r, LoadsIn(t, c, start, L))

(* Take the span of a failed load out of the tree, with all below it.      *)
Withdraw(s, o) ==
    LET c     == ChainOf[o.r]
        below == {p \in s.ops : p.k = "load" /\ p.lock /\ ChainOf[p.r] = c /\ p.b > o.a}
        lost  == Len(s.tree[c]) - o.a
        kept  == Total([p \in below |-> p.b - p.a], below)
        t     == Truncate([s EXCEPT !.ops = (@ \ below) \cup {[p EXCEPT !.lock = FALSE, !.dq = p.b - p.a] : p \in below},
                                    !.dfree = @ + lost - kept], c, o.a)
        pins  == {r \in Req : ChainOf[r] = c /\ s.pin[r] > o.a}
    IN [t EXCEPT !.pin = [r \in Req |-> IF r \in pins THEN 0 ELSE @[r]], !.pinned = @ - Total(s.pin, pins),
                 !.news = @ \/ pins # {}]

-----------------------------------------------------------------------------
(* Actions *)

Init == st = [
    ph |-> [r \in Req |-> "new"], att |-> [r \in Req |-> 0], open |-> [r \in Req |-> FALSE],
    ret |-> [r \in Req |-> 0], def |-> [r \in Req |-> 0], chn |-> [r \in Req |-> 0],
    base |-> [r \in Req |-> 0], end |-> [r \in Req |-> 0], rel |-> [r \in Req |-> 0], pace |-> [r \in Req |-> 0],
    hold |-> [r \in Req |-> <<>>], pin |-> [r \in Req |-> 0], lock |-> [r \in Req |-> 0], own |-> [r \in Req |-> 0],
    ops |-> {}, tree |-> [c \in Chains |-> [i \in 1..Warm[c] |-> NoLoad]],
    free |-> Rows, data |-> [x \in Rows |-> NoData], dfree |-> D - Total(Warm, Chains), pinned |-> 0,
    parked |-> <<>>, why |-> "none", news |-> TRUE, byp |-> 0, tried |-> 0,
    on |-> TRUE, retracts |-> Retracts,
    spans |-> [w \in Spans |-> [q |-> "none", c |-> 0, p |-> 0, row |-> 0]]]

(* The client and the scheduler *)

Submit == \E r \in Req : /\ st.ph[r] = "new" /\ \A q \in Req : q < r => st.ph[q] # "new"
                         /\ st' = Open(st, r, 0, FALSE)
Look(r)   == Ready(st, r) /\ Consider(st, r) # st /\ st' = Consider(st, r)
Admit(r)  == Settled(st, r) /\ st' \in AdmitStates(st, r)
Defer(r)  == /\ "defer" \in Env /\ st.ph[r] = "staged" /\ Settled(st, r)
             /\ st' = IF st.def[r] + 1 < DeferCap THEN [st EXCEPT !.def[r] = @ + 1] ELSE Close(ReturnHold(st, r), r)
Compute(r) == st.ph[r] \in Admitted /\ st.lock[r] < L /\ st' = Publish(st, r)
Finish(r)  == st.ph[r] \in Admitted /\ st' = End(st, r)
Abort(r)   == "abort" \in Env /\ st.ph[r] \in Live /\ st' = End(st, r)
Retract(r) == /\ "retract" \in Env /\ st.retracts > 0 /\ st.ph[r] \in Live
              /\ st' = [Open(End(st, r), r, 0, FALSE) EXCEPT !.retracts = @ - 1]

(* One pass: parked hits, deadlines, retries *)

LetPass(s) ==
    LET RECURSIVE Pass(_, _)
        Pass(t, q) ==
            IF q = <<>> \/ ~MayBypass(t) THEN t ELSE
            LET c == Commit(t, Head(q)) IN
            IF Pinnable(t, Head(q)) \/ c.no # "none" THEN Pass(t, Tail(q))
            ELSE Pass(IF c.s.ph[Head(q)] = "reading" THEN [c.s EXCEPT !.byp = @ + 1] ELSE c.s, Tail(q))
    IN IF ~MayBypass(s) THEN s ELSE Pass(s, SubSeq(s.parked, 2, Min(Len(s.parked), 1 + BypassCap)))

RECURSIVE Drained(_)
Drained(s) ==
    IF s.parked = <<>> THEN s ELSE
    LET r == Head(s.parked)
        c == Commit(s, r)
        t == Refused(s, c.no)
    IN IF c.no = "none" THEN Drained(c.s)
       ELSE IF t.chn[r] + 1 < ParkCap THEN LetPass([t EXCEPT !.chn[r] = @ + 1])
       ELSE Drained(Close(t, r))

Drain == st.parked # <<>> /\ st' = Drained(st)

Due(r) == "deadline" \in Env /\ st.ph[r] \in Timed /\ st' = Deadline(st, r)

HeadOf(s) == LET q == {r \in Req : s.ph[r] \in Waiting} IN IF q = {} THEN 0 ELSE MinOf(q)

RECURSIVE IssueAll(_, _)
IssueAll(s, A) == IF A = {} THEN s ELSE LET r == MinOf(A) IN IssueAll(Issue(s, r, IF s.ph[r] = "refetch" THEN s.end[r]
                                                                                 ELSE 0, 1), A \ {r})
Retried(s) ==
    LET h == HeadOf(s)
        t == IF h # 0 /\ s.ph[h] = "paced" THEN To(s, h, "idle") ELSE s
        u == [t EXCEPT !.pace = [r \in Req |-> IF @[r] > 0 THEN @[r] - 1 ELSE 0]]
    IN IssueAll(u, {r \in Req : u.ph[r] = "refetch" \/ (u.ph[r] = "paced" /\ u.pace[r] = 0)})

Retry == (\E r \in Req : st.ph[r] \in {"paced", "refetch"}) /\ st' = Retried(st)

(* The outside: answers *)

LookupDone == \E o \in st.ops : /\ o.k = "lookup"
    /\ LET t == [st EXCEPT !.ops = @ \ {o}] IN
       IF ~IsOwn(st, o) THEN st' = t
       ELSE \E h \in (IF "miss" \in Env THEN 0 ELSE o.n)..o.n : st' = Hit(t, o.r, h)

Landed(s, o, n) == [s EXCEPT !.data = [x \in Rows |-> IF x \in Range(First(o.rows, n)) THEN o.ep ELSE @[x]]]

ReadProgress == "progress" \in Env /\ \E o \in st.ops : /\ o.k = "read" /\ IsOwn(st, o)
    /\ \E n \in (o.got + 1)..Len(o.rows) :
         st' = Landed([st EXCEPT !.ops = (@ \ {o}) \cup {[o EXCEPT !.got = n]}], o, n)

ReadDone == \E o \in st.ops : /\ o.k = "read"
    /\ LET t == [st EXCEPT !.ops = @ \ {o}]
           r == o.r
       IN IF ~IsOwn(st, o) THEN st' = GiveRows(t, o.own)
          ELSE \E n \in (IF "partial" \in Env THEN o.got ELSE Len(o.rows))..Len(o.rows) :
               st' = IF n = 0 THEN [To(ReturnHold(t, r), r, "idle") EXCEPT !.end[r] = 0]
                     ELSE LET rest == {o.rows[i] : i \in (n + 1)..Len(o.rows)}
                              u    == GiveRows(Landed(t, o, n), rest)
                          IN To([u EXCEPT !.hold[r] = First(@, n), !.end[r] = st.base[r] + n], r, "staged")

Unload(s, o) == GiveRows([s EXCEPT !.ops = @ \ {o}, !.dfree = @ + o.dq,
                                   !.tree = [c \in Chains |-> [i \in 1..Len(@[c]) |-> IF @[c][i] = LoadId(o) THEN NoLoad
                                                                                      ELSE @[c][i]]]], o.own)
LoadDone == \E o \in st.ops : /\ o.k = "load"
    /\ st' = IF IsOwn(st, o) THEN To(Unload(st, o), o.r, "resident") ELSE Unload(st, o)

LoadFailed == "loadfail" \in Env /\ \E o \in st.ops : /\ o.k = "load"
    /\ LET ended == EndAll(st, o.deps)
           now   == [o EXCEPT !.deps = {}]
           t     == GiveRows([ended EXCEPT !.ops = @ \ {now}, !.dfree = @ + o.dq], o.own)
           u     == IF o.lock THEN Withdraw(t, now) ELSE t
       IN st' = RestartAll(u, o.deps, st.ret)

(* Pressure and operators *)

Evict == "evict" \in Env /\ \E c \in Chains : Evictable(st, c) > 0
    /\ st' = [Truncate(st, c, Len(st.tree[c]) - 1) EXCEPT !.dfree = @ + 1]

RECURSIVE CloseAll(_, _)
CloseAll(s, A) ==
    IF A = {} THEN s ELSE
    LET r == MinOf(A)
        t == CASE s.ph[r] = "staged"      -> [s EXCEPT !.open[r] = FALSE]
               [] s.ph[r] = "recomputing" -> s
               [] OTHER                   -> Close(ReturnHold(Orphan(s, r), r), r)
    IN CloseAll(t, A \ {r})
Detach == /\ "detach" \in Env /\ st.on
          /\ st' = [CloseAll(st, {r \in Req : st.ph[r] \in Waiting}) EXCEPT
                      !.on = FALSE, !.spans = [w \in Spans |-> IF @[w].q = "queued" THEN [@[w] EXCEPT !.q = "dropped"]
                                                                ELSE @[w]]]

(* The write path. A page is queued for writing at any time while it is on *)
(* the device (what is believed to be stored only makes it rarer), staged  *)
(* in order within the share that reads leave, copied, and written.        *)

Wanted(s) == IF s.parked = <<>> \/ s.why = "pin" THEN 0
             ELSE LET r == Head(s.parked) IN Max(0, s.end[r] - Max(s.base[r], Match(s, r)))
WriteRoom(s) ==
    LET left  == S - ReadsHold(s) - Wanted(s)
        share == IF Wanted(s) > S - WriteFloor THEN Max(0, S - Wanted(s)) ELSE Max(WriteFloor, left - WriteMargin)
    IN Min(share - Cardinality(SpanRows(s)), Cardinality(s.free))

SetSpan(s, w, q) == [s EXCEPT !.spans[w].q = q]
Enqueue == \E w \in Spans : /\ st.spans[w].q = "none" /\ st.on /\ \A v \in 1..(w - 1) : st.spans[v].q # "none"
    /\ \E c \in Chains : \E p \in 1..Len(st.tree[c]) :
         /\ \A v \in Spans : st.spans[v].q \in {"queued", "copying", "storing"}
                               => <<st.spans[v].c, st.spans[v].p>> # <<c, p>>
         /\ st' = [st EXCEPT !.spans[w] = [q |-> "queued", c |-> c, p |-> p, row |-> 0]]
Stage == \E w \in Spans : /\ st.spans[w].q = "queued" /\ st.on /\ \A v \in 1..(w - 1) : st.spans[v].q # "queued"
    /\ LET x == st.spans[w] IN
       \/ x.p > Len(st.tree[x.c]) /\ st' = SetSpan(st, w, "dropped")
       \/ x.p <= Len(st.tree[x.c]) /\ st' = SetSpan(st, w, "dropped") /\ x.p > 1        \* its parent is not stored
       \/ /\ x.p <= Len(st.tree[x.c]) /\ LoadsIn(st, x.c, 0, x.p) = {} /\ WriteRoom(st) > 0
          /\ LET row == MinOf(st.free) IN
             st' = [st EXCEPT !.spans[w] = [x EXCEPT !.q = "copying", !.row = row], !.free = @ \ {row}]
SpanEnd(s, w, q) == GiveRows([SetSpan(s, w, q) EXCEPT !.spans[w].row = 0], {s.spans[w].row})
Copied == \E w \in Spans : /\ st.spans[w].q = "copying"
    /\ \/ st' = SetSpan(st, w, "storing")
       \/ "writefail" \in Env /\ st' = SpanEnd(st, w, "dropped")
Stored == \E w \in Spans : /\ st.spans[w].q = "storing"
    /\ \/ st' = SpanEnd(st, w, "stored")
       \/ "writefail" \in Env /\ st' = SpanEnd(st, w, "dropped")

-----------------------------------------------------------------------------
Passes  == Drain \/ Retry \/ \E r \in Req : Due(r)
Engine  == \E r \in Req : Look(r) \/ Admit(r) \/ Finish(r)
Answers == LookupDone \/ ReadDone \/ LoadDone \/ Copied \/ Stored

Next == \/ Submit \/ Drain \/ Retry \/ Detach \/ Evict
        \/ LookupDone \/ ReadProgress \/ ReadDone \/ LoadDone \/ LoadFailed
        \/ Enqueue \/ Stage \/ Copied \/ Stored
        \/ \E r \in Req : Look(r)
        \/ \E r \in Req : Admit(r)
        \/ \E r \in Req : Defer(r)
        \/ \E r \in Req : Compute(r)
        \/ \E r \in Req : Finish(r)
        \/ \E r \in Req : Abort(r)
        \/ \E r \in Req : Retract(r)
        \/ \E r \in Req : Due(r)

Spec == Init /\ [][Next]_st

(* Fairness, only where it is owed. Look-ups and reads may stay unanswered *)
(* for ever in Spec1: the deadline is what ends those waits. In Spec2      *)
(* every operation is answered at last. Nothing obliges anybody to abort,  *)
(* retract, evict, detach, defer, fail, report progress or compute.        *)
Spec1 == Spec /\ WF_st(Passes \/ Engine \/ LoadDone)
Spec2 == Spec /\ WF_st(Passes \/ Engine \/ Answers \/ Stage)

-----------------------------------------------------------------------------
(* Invariants *)

Owners(x) == Cardinality({r \in Req : x \in Range(st.hold[r])}) + Cardinality({o \in st.ops : x \in o.own})
             + Cardinality({w \in SpanRows(st) : st.spans[w].row = x}) + (IF x \in st.free THEN 1 ELSE 0)
StagingConserved == \A x \in Rows : Owners(x) = 1

PinsConserved == st.pinned = Total(st.pin, Req) /\ st.pinned <= PinCap

DeviceConserved ==
    st.dfree + Total([c \in Chains |-> Len(st.tree[c])], Chains) + Total(st.own, Req)
             + Total([o \in st.ops |-> o.dq], st.ops) = D /\ st.dfree >= 0

Ownership == \A r \in Req :
    /\ (st.hold[r] # <<>>) = (st.ph[r] \in {"reading", "staged"})
    /\ st.pin[r] > 0 => st.ph[r] \in {"reading", "staged"}
    /\ (st.lock[r] > 0 \/ st.own[r] > 0) => st.ph[r] \in Admitted

(* No row is reused while an operation may touch it.                       *)
NoReuse == \A o \in st.ops : \A x \in Touched(o) :
    /\ x \notin st.free
    /\ x \in o.own \/ (o.k = "read" /\ IsOwn(st, o) /\ x \in Range(st.hold[o.r]))

Identity == \A r \in Req : st.ph[r] \in DOMAIN KindOf => \E o \in st.ops : o.r = r /\ IsOwn(st, o)

StagedIsCurrent == \A r \in Req : st.ph[r] = "staged" =>
    /\ \A x \in Range(st.hold[r]) : st.data[x] = <<st.att[r], st.ret[r]>>
    /\ Len(st.hold[r]) = st.end[r] - st.base[r]

CapsHold == \A r \in Req :
    /\ st.ret[r] <= RetryCap /\ st.def[r] < DeferCap /\ st.chn[r] < ParkCap
    /\ st.ph[r] \in {"paced", "refetch"} => st.ret[r] < RetryCap   \* so `exhausted` never happens
BypassBounded == st.byp <= BypassCap

Armed == \A r \in Req : (st.pace[r] > 0) = (st.ph[r] = "paced")

ParkedExactly == /\ Range(st.parked) = {r \in Req : st.ph[r] = "parked"}
                 /\ Cardinality(Range(st.parked)) = Len(st.parked)

(* A head that was refused and has no news since (no room or pin came back, *)
(* its match is what it was) would be refused again.                       *)
NoLostWakeup == (st.parked # <<>> /\ ~st.news /\ Match(st, Head(st.parked)) = st.tried) =>
    Commit(st, Head(st.parked)).no # "none"

LoadSpans == \A o \in st.ops : o.k = "load" =>
    IF o.lock THEN o.dq = 0 /\ \A i \in (o.a + 1)..o.b : st.tree[ChainOf[o.r]][i] = LoadId(o)
    ELSE o.dq = o.b - o.a
Dependents == \A o \in st.ops : (o.k = "load" /\ o.lock) =>
    {r \in Req : ChainOf[r] = ChainOf[o.r] /\ st.lock[r] > o.a} = o.deps

Safety == /\ StagingConserved /\ PinsConserved /\ DeviceConserved /\ Ownership /\ NoReuse /\ Identity
          /\ StagedIsCurrent /\ CapsHold /\ BypassBounded /\ Armed /\ ParkedExactly /\ NoLostWakeup /\ LoadSpans
          /\ Dependents

(* A younger hit is read before an older parked one only past a head that  *)
(* waits for pin budget which the younger does not need.                   *)
TurnKept == [][\A r \in Req : (st.ph[r] # "reading" /\ st'.ph[r] = "reading") =>
    \A q \in Range(st'.parked) \cap Range(st.parked) :
        \/ \E i, j \in 1..Len(st.parked) : st.parked[i] = r /\ st.parked[j] = q /\ i < j
        \/ st'.why = "pin" /\ st'.pin[r] = 0 /\ st'.byp <= BypassCap]_st

(* Liveness *)

Leaves  == \A r \in Req : (st.ph[r] \in Waiting) ~> (st.ph[r] \notin Waiting)
Rest    == /\ \A r \in Req : st.ph[r] \in {"new", "gone"}
           /\ st.ops = {} /\ st.free = Rows /\ st.pinned = 0
           /\ st.dfree + Total([c \in Chains |-> Len(st.tree[c])], Chains) = D
AllBack == <>[]Rest
WritesEnd == \A w \in Spans : (st.spans[w].q # "none") ~> (st.spans[w].q \in {"stored", "dropped"})
=============================================================================
