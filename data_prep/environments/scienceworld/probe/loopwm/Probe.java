package loopwm;

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.ObjectInputStream;
import java.io.ObjectOutputStream;
import java.lang.reflect.Field;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Random;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.stream.Collectors;
import scala.Option;
import scala.collection.JavaConverters;
import scienceworld.objects.devices.StopWatch;
import scienceworld.objects.electricalcomponent.Terminal;
import scienceworld.objects.livingthing.LivingThing;
import scienceworld.objects.livingthing.animals.Animal;
import scienceworld.objects.livingthing.plant.Flower;
import scienceworld.objects.location.Outside;
import scienceworld.objects.location.Room;
import scienceworld.objects.misc.InclinedPlane;
import scienceworld.objects.taskitems.UnknownSubstanceElectricalConductivity;
import scienceworld.objects.taskitems.UnknownSubstanceThermal;
import scienceworld.processes.genetics.GeneticTrait;
import scienceworld.processes.lifestage.LifeCycle;
import scienceworld.processes.lifestage.LifeStage;
import scienceworld.properties.ContainerProperties;
import scienceworld.properties.MaterialProperties;
import scienceworld.runtime.AgentInterface;
import scienceworld.runtime.pythonapi.PythonInterface;
import scienceworld.struct.EnvObject;

/**
 * Answers in one call what would take the collector hundreds: each call from Python is a round trip.
 *
 * Parts of an answer are separated by SEPARATOR. Compiled with `javac --release 11 -cp scienceworld.jar Probe.java`.
 */
public final class Probe {
    private static final String SEPARATOR = "\u001e";
    private static final int CURSORY = 0; // the simulator's MODE_CURSORY_DETAIL: what `look around` prints

    private final PythonInterface server;
    private final Field randomNumbers;
    private final Object randomHolder;

    public Probe(PythonInterface server) throws ReflectiveOperationException {
        this.server = server;
        randomHolder = Class.forName("scala.util.Random$").getField("MODULE$").get(null);
        randomNumbers = Class.forName("scala.util.Random").getDeclaredField("self");
        randomNumbers.setAccessible(true);
    }

    /** Takes a step: observation, score (0 to 100), whether the simulator calls it the end, look, inventory. */
    public String step(String command) {
        String observation = server.step(command);
        return String.join(SEPARATOR, observation, Long.toString((long) Math.rint(100 * server.getScore())),
            Boolean.toString(server.getCompleted()), server.freeActionLook(), server.freeActionInventory());
    }

    /** The task and variation that are loaded. */
    public String loaded() {
        return server.taskStr() + SEPARATOR + server.taskVariationIdx();
    }

    /** Actions that make sense now. The simulator draws random numbers to find them; they are given back. */
    public String validActions() throws IOException, ReflectiveOperationException {
        Random before = copyOf((Random) randomNumbers.get(randomHolder));
        String found = String.join(SEPARATOR, server.getValidActionObjectCombinations());
        randomNumbers.set(randomHolder, before);
        return found;
    }

    /**
     * The agent's room, then six parts for each thing that can be moved, shut or switched on: its id, name and
     * container, "open" or "closed", "on" or "off" (or nothing), how many connections it has.
     */
    public String arrangement() {
        List<String> parts = new ArrayList<>(List.of(containerName(agentInterface().agent())));
        for (EnvObject thing : everything()) {
            ContainerProperties container = thing.propContainer().isDefined() ? thing.propContainer().get() : null;
            boolean shuts = container != null && container.isClosable();
            boolean switches = thing.propDevice().isDefined() && thing.propDevice().get().isActivable();
            if (thing instanceof Animal || !(movable(thing) || shuts || switches)) continue;
            parts.addAll(List.of(Long.toString(thing.uuid()), thing.getName(), containerName(thing),
                !shuts ? "" : container.isOpen() ? "open" : "closed",
                !switches ? "" : thing.propDevice().get().isActivated() ? "on" : "off",
                Integer.toString(connections(thing))));
        }
        return String.join(SEPARATOR, parts);
    }

    /** The look of every room by name, then what looking does not tell, one fact a line, sorted. */
    public String hiddenState() {
        TreeMap<String, String> rooms = new TreeMap<>();
        for (EnvObject thing : contents(universe())) {
            if (isPlace(thing)) rooms.put(thing.getName(), thing.getDescription(CURSORY).strip());
        }
        TreeSet<String> facts = new TreeSet<>();
        Collection<EnvObject> everything = everything();
        for (EnvObject thing : everything) addFacts(thing, facts);
        addTemperatures(facts);
        if (agentInterface().inputParser().isInAmbiguousState()) facts.add("waiting for a number");
        List<String> lines = new ArrayList<>(rooms.values());
        lines.addAll(facts);
        return String.join("\n", lines);
    }

    private static Random copyOf(Random numbers) throws IOException, ClassNotFoundException {
        ByteArrayOutputStream written = new ByteArrayOutputStream();
        new ObjectOutputStream(written).writeObject(numbers);
        return (Random) new ObjectInputStream(new ByteArrayInputStream(written.toByteArray())).readObject();
    }

    private AgentInterface agentInterface() {
        return server.agentInterface().get();
    }

    private EnvObject universe() {
        return agentInterface().universe();
    }

    private Collection<EnvObject> everything() {
        return JavaConverters.setAsJavaSet(universe().getContainedObjectsRecursive());
    }

    private static Collection<EnvObject> contents(EnvObject thing) {
        return JavaConverters.setAsJavaSet(thing.getContainedObjects(true));
    }

    private static boolean isPlace(EnvObject thing) {
        return thing instanceof Room || thing instanceof Outside;
    }

    private static boolean movable(EnvObject thing) {
        return thing.propMoveable().isDefined() && thing.propMoveable().get().isMovable();
    }

    private static String containerName(EnvObject thing) {
        Option<EnvObject> container = thing.getContainer();
        return container.isDefined() ? container.get().getName() : "";
    }

    private static int connections(EnvObject thing) {
        int found = 0;
        for (EnvObject part : contents(thing)) {
            if (part instanceof Terminal && part.propElectricalConnection().isDefined()) {
                found += part.propElectricalConnection().get().size();
            }
        }
        return found;
    }

    private static String where(EnvObject thing) {
        String container = containerName(thing);
        return container.isEmpty() ? thing.getName() : thing.getName() + " in " + container;
    }

    private static String number(double value, int decimals) {
        return String.format(Locale.ROOT, "%." + decimals + "f", value);
    }

    /** As %g of C and Python: no trailing zeros. */
    private static String shortest(double value) {
        return value == Math.rint(value) ? Long.toString((long) value)
            : String.format(Locale.ROOT, "%.4f", value).replaceAll("0+$", "");
    }

    private void addFacts(EnvObject thing, Collection<String> facts) {
        if (thing instanceof UnknownSubstanceElectricalConductivity || thing instanceof UnknownSubstanceThermal) {
            facts.add(substanceFact(thing));
        } else if (thing instanceof InclinedPlane) {
            addPlane((InclinedPlane) thing, facts);
        } else if (thing instanceof StopWatch) {
            addStopWatch((StopWatch) thing, facts);
        } else if (thing instanceof Flower) {
            addPollination(thing, facts);
        } else if (thing instanceof LivingThing) {
            addLifeStage((LivingThing) thing, facts);
        }
        addTraits(thing, facts);
        addContainer(thing, facts);
        addConnections(thing, facts);
        if (thing.propDevice().isDefined() && thing.propDevice().get().isBroken()) facts.add(where(thing) + ": broken");
    }

    private static String substanceFact(EnvObject thing) {
        MaterialProperties material = thing.propMaterial().get();
        String conducts = material.electricallyConductive() ? "conducts" : "does not conduct";
        return thing.getName() + ": melting point " + shortest(material.meltingPoint()) + ", " + conducts
            + " electricity";
    }

    private static void addPlane(InclinedPlane plane, Collection<String> facts) {
        String name = plane.getDescriptName("");
        facts.add(name + ": angle " + shortest(plane.angleDeg())
            + ", friction " + shortest(plane.surfaceMaterial().frictionCoefficient()));
        for (EnvObject thing : contents(plane)) {
            Option<Object> position = plane.getObjectPositionOnPlane(thing);
            if (position.isDefined()) {
                facts.add(thing.getName() + " on " + name + ": " + number(100 * (1 - (Double) position.get()), 2)
                    + " percent down");
            }
        }
    }

    private static void addStopWatch(StopWatch watch, Collection<String> facts) {
        if (watch.stopwatchCurTime() > 0 || watch.stopwatchUserTime() > 0) {
            facts.add(where(watch) + ": " + watch.stopwatchCurTime() + " ticks, shows " + watch.stopwatchUserTime());
        }
    }

    private static void addPollination(EnvObject flower, Collection<String> facts) {
        if (flower.propPollination().isDefined() && flower.propPollination().get().pollinationStep() > 0) {
            int ticks = flower.propPollination().get().pollinationStep();
            facts.add(where(flower) + ": pollinated for " + ticks + " ticks");
        }
    }

    private static void addLifeStage(LivingThing thing, Collection<String> facts) {
        if (thing.lifecycle().isEmpty()) return;
        LifeCycle cycle = thing.lifecycle().get();
        LifeStage stage = cycle.getCurStage();
        String kind = stage.getClass().getSimpleName();
        if (kind.contains("Forever") || kind.contains("Death")) return;
        StringBuilder fact = new StringBuilder(where(thing)).append(": ").append(cycle.getCurStageName());
        appendTicks(fact, stage, "ticksMeetingCriteria", " ticks");
        appendTicks(fact, stage, "durationWithoutWater", " without water");
        appendTicks(fact, stage, "durationWithoutSoil", " without soil");
        appendTicks(fact, stage, "durationOutOfTemperatureBounds", " too hot or cold");
        facts.add(fact.toString());
    }

    /** The stages count under the same names without a common type. */
    private static void appendTicks(StringBuilder fact, LifeStage stage, String counter, String unit) {
        try {
            int ticks = (Integer) stage.getClass().getMethod(counter).invoke(stage);
            if (ticks > 0) fact.append(", ").append(ticks).append(unit);
        } catch (ReflectiveOperationException error) {
            return; // this stage does not count that
        }
    }

    private static void addTraits(EnvObject thing, Collection<String> facts) {
        if (thing.propChromosomePairs().isEmpty()) return;
        String name = thing.getName();
        String plant = name.endsWith(" seed") ? name.substring(0, name.length() - " seed".length()) : name;
        for (GeneticTrait trait : thing.propChromosomePairs().get().getPhenotypes()) {
            facts.add(plant + ": " + trait.valueDominant() + " " + trait.traitName() + " is dominant, "
                + trait.valueRecessive() + " " + trait.traitName() + " is recessive");
        }
    }

    private static void addContainer(EnvObject thing, Collection<String> facts) {
        if (thing.propContainer().isEmpty()) return;
        ContainerProperties container = thing.propContainer().get();
        if (container.isContainer() && !container.isOpen() && container.isClosable() && !parts(thing).isEmpty()) {
            facts.add("a closed " + where(thing) + " holds: " + listing(thing));
        }
    }

    private static List<EnvObject> parts(EnvObject thing) {
        return contents(thing).stream().filter(part -> !(part instanceof Terminal)).collect(Collectors.toList());
    }

    private static String listing(EnvObject thing) {
        return parts(thing).stream().map(part -> part.getDescription(CURSORY).strip())
            .collect(Collectors.joining(", "));
    }

    private static void addConnections(EnvObject thing, Collection<String> facts) {
        if (!(thing instanceof Terminal) || thing.propElectricalConnection().isEmpty()) return;
        for (EnvObject other : JavaConverters.setAsJavaSet(thing.propElectricalConnection().get().getConnections())) {
            String[] ends = {endName(thing), endName(other)};
            Arrays.sort(ends); // one line a connection, whichever end it is seen from
            facts.add(ends[0] + " is connected to " + ends[1]);
        }
    }

    private static String endName(EnvObject terminal) {
        return terminal.getName() + " of " + containerName(terminal);
    }

    /** Of what can be moved in the agent's room and hands: in whole degrees, of substances to a tenth. */
    private void addTemperatures(Collection<String> facts) {
        EnvObject agent = agentInterface().agent();
        if (agent.getContainer().isEmpty()) return;
        Map<Double, TreeSet<String>> names = new TreeMap<>();
        for (EnvObject thing : JavaConverters.setAsJavaSet(agent.getContainer().get().getContainedObjectsRecursive())) {
            if (thing.propMaterial().isEmpty() || !movable(thing)) continue;
            MaterialProperties material = thing.propMaterial().get();
            double scale = material.substanceName().equals(thing.getName()) ? 10 : 1;
            double rounded = Math.rint(material.temperatureC() * scale) / scale;
            names.computeIfAbsent(rounded, key -> new TreeSet<>()).add(thing.getName());
        }
        names.forEach((degrees, things) ->
            facts.add("temperature " + shortest(degrees) + ": " + String.join(", ", things)));
    }
}
