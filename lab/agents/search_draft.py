import sys,re,json,time,glob,lzma
from collections import Counter,defaultdict
from dataclasses import dataclass
from random import Random
import numpy as np, torch
from loopwm.records.template import Context, Transition
from loopwm.text.decoding import Decoder
from loopwm.text.drafts import Lookup, SharedText
from loopwm.worlds.local import LocalWorlds
from functools import partial
LAMP=re.compile(r"(?:examine|look at) (?:the )?(\w+) (?:with|under) the (\w+)\.")
GOAL=re.compile(r"(?:find two (?P<two>\w+) and put them|put two (?P<two2>\w+)|(?P<verb>clean|cool|heat) some (?P<treated>\w+) and put it|put an? (?P<state>clean|cool|hot) (?P<stated>\w+)|put (?:an?|some) (?P<plain>\w+)) (?:in|on) (?P<place>\w+)\.")
APP={"clean":("clean","sinkbasin"),"cool":("cool","fridge"),"heat":("heat","microwave"),"hot":("heat","microwave")}
def goal(text):
    if m:=LAMP.search(text): return dict(thing=m[1],lamp=m[2],place=None,count=1,treat=None)
    m=GOAL.search(text)
    if m is None: raise ValueError(text)
    g=m.groupdict()
    thing=g["two"] or g["two2"] or g["treated"] or g["stated"] or g["plain"]
    return dict(thing=thing,lamp=None,place=g["place"],count=2 if g["two"] or g["two2"] else 1,treat=APP.get(g["verb"] or g["state"]))
NAME=re.compile(r"[a-z]+ \d+")
kind=lambda n:n.split()[0]
class Seen:
    def __init__(s,c):
        s.places=NAME.findall(c.observation.split("you see")[1].split("Your task")[0])
        s.contents={}; s.closed=set(); s.here=None; s.held=None; s.treated=set(); s.delivered=0; s.lookedin=set()
        for t in c.history:
            o=t.observation
            if m:=re.search(r"You arrive at (\w+ \d+)",o): s.here=m[1]
            if o.startswith("Nothing happens") and t.action.startswith("go to "): s.here=t.action[6:]
            for m in re.finditer(r"The (\w+ \d+) is closed",o): s.closed.add(m[1])
            if m:=re.match(r"You open the (\w+ \d+)",o): s.closed.discard(m[1])
            for m in re.finditer(r"(?:On the|The) (\w+ \d+)(?: is open\. In it)?, you see (.*?)\.",o): s.contents[m[1]]=NAME.findall(m[2])
            if m:=re.match(r"You pick up the (\w+ \d+) from the (\w+ \d+)",o):
                s.held=m[1]; 
                if m[1] in s.contents.get(m[2],[]): s.contents[m[2]].remove(m[1])
            if m:=re.match(r"You move the (\w+ \d+) to the (\w+ \d+)",o): s.held=None; s.contents.setdefault(m[2],[]).append(m[1])
            if m:=re.match(r"You (?:heat|cool|clean) the (\w+ \d+) using",o): s.treated.add(m[1])
class Agent:
    def __init__(s,order): s.order=order; s.orders={}
    def search(s,c,g,seen,what):
        if seen.here in seen.closed: return f"open {seen.here}"
        if what not in s.orders:
            ps=[p for p in seen.places if p not in seen.contents]
            s.orders[what]=s.order(c,what,ps)
            if what==g["thing"] and not g["treat"]: s.orders[what].sort(key=lambda p:kind(p)==g["place"])
        for p in s.orders[what]:
            if p not in seen.contents: return f"examine {p}" if p==seen.here else f"go to {p}"
        return None
    def act(s,c):
        g=goal(c.goal); seen=Seen(c)
        held=seen.held
        if held and kind(held)==g["thing"]:
            if g["treat"] and held not in seen.treated:
                a=next((p for p in seen.places if kind(p)==g["treat"][1]),None)
                if a is None: return None
                return f"{g['treat'][0]} {held} with {a}" if seen.here==a else f"go to {a}"
            if g["lamp"]:
                for p,ts in seen.contents.items():
                    for t in ts:
                        if kind(t)==g["lamp"]: return f"use {t}" if seen.here==p else f"go to {p}"
                return s.search(c,g,seen,g["lamp"])
            done=[p for p,ts in seen.contents.items() if kind(p)==g["place"] and any(kind(t)==g["thing"] for t in ts)]
            ps=(done if g["count"]>1 else [])+[p for p in seen.places if kind(p)==g["place"]]
            if not ps: return None
            p=ps[0]
            if seen.here!=p: return f"go to {p}"
            return f"open {p}" if p in seen.closed else f"move {held} to {p}"
        if held: return None
        for p,ts in seen.contents.items():
            for t in ts:
                if kind(t)==g["thing"] and (g["treat"] or g["lamp"] or kind(p)!=g["place"]):
                    if seen.here!=p: return f"go to {p}"
                    return f"take {t} from {p}"
        return s.search(c,g,seen,g["thing"])
def listed(c,what,ps): return list(ps)
def shuffled(seed):
    def f(c,what,ps): ps=sorted(ps); Random(f"{seed}{c.goal}{what}").shuffle(ps); return ps
    return f
class Table:
    def __init__(s,folders):
        s.shown=Counter(); s.looks=Counter(); s.closed=Counter(); s.came=Counter()
        for d in folders:
            for f in sorted(glob.glob(d+"/*.xz")):
                for line in lzma.open(f,"rt"):
                    e=json.loads(line)
                    if e["split"]!="train" : continue
                    known=set()
                    for st in e["steps"][1:]:
                        o=st["observation"]
                        if m:=re.match(r"You arrive at (\w+) (\d+)\. (.*)",o):
                            s.came[m[1]]+=1; s.closed[m[1]]+= "is closed" in m[3]
                        for m in re.finditer(r"(?:On the|The) (\w+ \d+)(?: is open\. In it)?, you see (.*?)\.",o):
                            if m[1] in known: continue
                            known.add(m[1]); k=kind(m[1]); s.looks[k]+=1
                            for t in set(map(kind,NAME.findall(m[2]))): s.shown[k,t]+=1
    def value(s,k,what): return (s.shown[k,what]+.01)/(s.looks[k]+1)/(1+(s.closed[k]+.5)/(s.came[k]+1))
    def __call__(s,c,what,ps): return sorted(ps,key=lambda p:-s.value(kind(p),what))
class Model:
    def __init__(s,path,samples,pool=True,seed=0):
        s.w=LocalWorlds.from_pretrained(path); s.m=s.w._model; s.k=samples; s.pool=pool; s.g=torch.Generator().manual_seed(seed); s.time=0; s.texts=0
    @torch.inference_mode()
    def sample(s,states,ks):
        def forward(rule,st,tok,step,rows):
            l,loops=s.m._next_tokens(rule,st,tok,step,rows)
            return l.float().log_softmax(-1)-torch.log(-torch.log(torch.rand(l.shape,generator=s.g).clamp(1e-9,1-1e-7))),loops
        d=Decoder(partial(forward,states[0].depth),s.m._obs,s.m._end,100,drafts=False)
        rows=[w for w in states for _ in range(ks)]
        out=d.greedy([s.m.before_decoding(w) for w in rows],[Lookup(SharedText(),"") for _ in rows])
        return s.m.tokenizer.batch_decode([list(r.tokens) for r in out],skip_special_tokens=True)
    def belief(s,c,what,ps):
        by=defaultdict(list)
        for p in ps: by[kind(p)].append(p)
        reps=[(k,p) for k,l in by.items() for p in Random(k+c.goal).sample(sorted(l),min(2,len(l)))]
        s.w.begin([c]); f=s.w.fork([0]*len(reps)); first=f.step([f"go to {p}" for _,p in reps])
        shut=[i for i,x in enumerate(first) if "is closed" in x.observation]
        if shut: f.step([f"open {reps[i][1]}" for i in shut],decode=False,rows=shut)
        n=Counter(k for k,_ in reps)
        rows=[i for i,(k,_) in enumerate(reps) for _ in range(s.k//n[k])]
        texts=s.sample([f._now[i] for i in rows],1); s.texts+=len(texts)
        pat=re.compile(rf"\b{what} \d")
        hit=defaultdict(list)
        for i,t in zip(rows,texts): hit[reps[i][0]].append(bool(pat.search(t)))
        cost={k:np.mean([2 if i in shut else 1 for i,(kk,_) in enumerate(reps) if kk==k]) for k in by}
        return {k:float(np.mean(v)) for k,v in hit.items()},cost
    def __call__(s,c,what,ps):
        b=time.time(); share,cost=s.belief(c,what,ps); s.time+=time.time()-b
        return sorted(ps,key=lambda p:-share[kind(p)]/cost[kind(p)])
def play(agent,world,game,most):
    c=world.start(game,"observed"); n=0; acts=[]
    while n<most:
        a=agent.act(c)
        if a is None: break
        st=world.step(a); n+=1; acts.append((a,st.observation))
        c=Context(c.goal,c.observation,(*c.history,Transition(a,st.observation)))
        if st.done: return True,n,acts
    return False,n,acts
if __name__=="__main__":
    from lab.agents.real_world import Game, RealWorld
    torch.set_num_threads(1)
    split,arms,limit,most=sys.argv[1],sys.argv[2].split(","),int(sys.argv[3]),60
    E="/work/main/runs/episodes/alfworld-"
    with RealWorld("alfworld") as world:
        env=world._environment
        games=[Game(t,v) for t in env.tasks() for v in env.variations(t,split) if not v.startswith("built")]
        Random(1).shuffle(games); games=games[:limit]
        print(len(games),"games")
        make={"listed":lambda:listed,"random":lambda:shuffled(0)}
        table=Table([E+n for n in ("train-expert","train-fork","train-noisy","built-expert","built-noisy")]) if "table" in arms or "original" in arms else None
        if "original" in arms: original=Table([E+"train-expert",E+"train-fork",E+"train-noisy"])
        model=Model("loopwm/pretrained",16) if "model" in arms else None
        order={"listed":listed,"random":shuffled(0),"table":table,"model":model}
        if "original" in arms: order["original"]=original
        res={a:[] for a in arms}
        for i,g in enumerate(games):
            for a in arms:
                ok,n,acts=play(Agent(order[a]),world,g,most); res[a].append((ok,n))
                if not ok: print(a,g.name,n,acts[-3:])
            if i%10==9 or i+1==len(games): print(i+1,{a:(np.mean([o for o,_ in r]),np.mean([n for _,n in r])) for a,r in res.items()},flush=True)
        if model: print("model seconds",model.time,"texts",model.texts)
        json.dump(res,open(f"/work/main/runs/alf/{split}-{sys.argv[4]}.json","w"))
