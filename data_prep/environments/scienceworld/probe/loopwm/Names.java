package loopwm;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.regex.Pattern;
import scala.Tuple2;
import scala.collection.JavaConverters;
import scala.util.Random$;
import scienceworld.input.InputParser;
import scienceworld.struct.EnvObject;

/**
 * What the simulator's InputParser asks about the names of things, with the same answers in less time.
 *
 * The methods stand in for those of the same name in InputParser, which the collector changes so that they call these
 * (class_patch.redirect). They are static, and only one world is played at a time.
 */
public final class Names {
    private static final int ATTEMPTS = 20; // chooseUniqueReferents': the first TURNS in turn, the others at random
    private static final int TURNS = 10;
    private static final int MOST_KEPT = 50_000; // texts, of a few dozen characters

    private static final Pattern SPACES = Pattern.compile("\\s+");
    private static final Map<String, String[]> TOKENS = new HashMap<>();

    private static final EnvObject[] NOTHING = {};
    private static EnvObject[] things = NOTHING;
    private static EnvObject perspective;
    private static String[][] names;
    private static final Map<String, Tuple2<Object, Tuple2<String, EnvObject>[]>> FOUND = new HashMap<>();

    private Names() {}

    /**
     * Whether the text begins with names of things, and for each that it does: the rest of the text, and the thing.
     *
     * The parser makes a new array of the things for each command, and asks about it once for each way to read the
     * command, while the world stands still. So what was found holds as long as the array is the same.
     */
    public static synchronized Tuple2<Object, Tuple2<String, EnvObject>[]> matchObj(
        String text, EnvObject[] things, EnvObject perspective
    ) {
        if (things != Names.things || perspective != Names.perspective) {
            Names.things = NOTHING; // until all names are known: a thing may fail to tell its own
            FOUND.clear();
            String[][] all = new String[things.length][];
            for (int i = 0; i < all.length; i++) all[i] = InputParser.getObjectReferents(things[i], perspective);
            names = all;
            Names.things = things;
            Names.perspective = perspective;
        }
        return FOUND.computeIfAbsent(text, Names::match);
    }

    @SuppressWarnings("unchecked") // no generic arrays in Java
    private static Tuple2<Object, Tuple2<String, EnvObject>[]> match(String text) {
        List<Tuple2<String, EnvObject>> found = new ArrayList<>();
        for (int i = 0; i < names.length; i++) {
            for (String name : names[i]) {
                if (text.startsWith(name)) found.add(new Tuple2<>(text.substring(name.length()).trim(), things[i]));
            }
        }
        return new Tuple2<>(!found.isEmpty(), found.toArray(new Tuple2[0]));
    }

    /** The words of a text but articles. The same array again for the same text: nobody writes in it. */
    public static synchronized String[] tokenize(String text) {
        String[] known = TOKENS.get(text);
        if (known == null) {
            if (TOKENS.size() == MOST_KEPT) TOKENS.clear();
            List<String> articles = Arrays.asList(InputParser.stopWords());
            List<String> tokens = new ArrayList<>();
            for (String token : SPACES.matcher(text.trim()).replaceAll(" ").split(" ")) {
                if (!articles.contains(token)) tokens.add(token);
            }
            known = tokens.toArray(new String[0]);
            TOKENS.put(text, known);
        }
        return known;
    }

    /**
     * Nothing, where the parser lists all names that may be used: it does so after every step, and prints the list.
     *
     * The things are asked all the same, since a step fails where one of them does.
     */
    public static String[] getPossibleReferents(EnvObject root, EnvObject perspective) {
        for (EnvObject thing : JavaConverters.setAsJavaSet(InputParser.collectAccessibleObjects(root, false))) {
            thing.getReferentsWithContainers(perspective);
        }
        return new String[0];
    }

    /** One of each thing's names, chosen so that few are the same. Draws the random numbers that the parser draws. */
    public static String[] chooseUniqueReferents(String[][] names) {
        String[][] candidates = withoutShared(names);
        Map<String, Integer> known = new HashMap<>();
        int[][] ids = new int[candidates.length][];
        for (int i = 0; i < ids.length; i++) {
            ids[i] = new int[candidates[i].length];
            for (int j = 0; j < ids[i].length; j++) {
                ids[i][j] = known.computeIfAbsent(candidates[i][j], name -> known.size());
            }
        }
        int[] chosen = new int[ids.length];
        int[] uses = new int[known.size()];
        boolean shared = true;
        for (int attempt = 0; shared && attempt < ATTEMPTS; attempt++) {
            Arrays.fill(uses, 0);
            for (int i = 0; i < ids.length; i++) uses[ids[i][chosen[i]]]++;
            shared = false;
            for (int i = 0; i < ids.length; i++) {
                if (uses[ids[i][chosen[i]]] == 1) continue;
                shared = true;
                chosen[i] = attempt < TURNS ? (chosen[i] + 1) % ids[i].length : Random$.MODULE$.nextInt(ids[i].length);
            }
        }
        String[] result = new String[chosen.length];
        for (int i = 0; i < result.length; i++) result[i] = candidates[i][chosen[i]];
        return result;
    }

    /** Each thing's names that no other has, in whatever case; all of them where others have each. */
    private static String[][] withoutShared(String[][] names) {
        Map<String, Integer> uses = new HashMap<>();
        for (String[] ofThing : names) {
            for (String name : ofThing) uses.merge(name.toLowerCase(), 1, Integer::sum);
        }
        String[][] result = new String[names.length][];
        for (int i = 0; i < result.length; i++) {
            String[] own = Arrays.stream(names[i]).filter(name -> uses.get(name.toLowerCase()) == 1)
                .toArray(String[]::new);
            result[i] = own.length > 0 ? own : names[i];
        }
        return result;
    }
}
