/* Modules, libraries and kernels.  What a driver reads out of a cubin is read here too:
 * the names of its kernels, their registers, shared memory and thread limit. */
#define _GNU_SOURCE
#include "standin.h"

#include <elf.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define KERNEL_MAGIC 0x4b495453u
#define EM_NVIDIA 190
#define STO_ENTRY 0x10
#define INFO_MAX_THREADS 0x05
#define INFO_REGISTERS 0x2f

struct library {
    struct si_kernel *kernels;
    size_t count;
    bool open_names; /* PTX or a packed container: any name is taken at its word */
    char *names;
    struct global {
        char *name;
        void *address;
        size_t size;
    } *globals;
    size_t global_count;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void fill(struct si_kernel *kernel, const char *name, struct library *library)
{
    kernel->magic = KERNEL_MAGIC;
    kernel->name = name;
    kernel->library = library;
    kernel->max_threads = 1024;
    kernel->max_dynamic_shared = 49152;
}

/* A thread limit follows from the registers when the kernel declares none. */
static int threads_for(int registers)
{
    if (registers <= 0)
        return 1024;
    int per_warp = (registers + 7) / 8 * 8 * 32;
    int warps = 65536 / per_warp / 4 * 4;
    return warps >= 32 ? 1024 : warps * 32;
}

/* From sm_90 on the section starts with what the system keeps of every block. */
static int static_shared(int section_bytes)
{
    int reserved = 0;
    si_attribute(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 0, &reserved);
    return section_bytes > reserved ? section_bytes - reserved : 0;
}

static void read_info(struct si_kernel *kernel, const unsigned char *info, size_t size)
{
    /* Entries: format, attribute, then 16 bits of value or of the payload's length. */
    for (size_t at = 0; at + 4 <= size;) {
        unsigned format = info[at], attribute = info[at + 1];
        unsigned length = info[at + 2] | info[at + 3] << 8;
        if (format != 4) {
            at += 4;
            continue;
        }
        if (at + 4 + length > size)
            return;
        if (attribute == INFO_MAX_THREADS && length >= 12) {
            uint32_t shape[3];
            memcpy(shape, info + at + 4, sizeof shape);
            kernel->max_threads = (int)(shape[0] * shape[1] * shape[2]);
        }
        at += 4 + length;
    }
}

static void read_registers(struct library *library, const unsigned char *info, size_t size,
                           const Elf64_Sym *symbols, size_t symbol_count, const char *strings)
{
    for (size_t at = 0; at + 4 <= size;) {
        unsigned format = info[at], attribute = info[at + 1];
        unsigned length = info[at + 2] | info[at + 3] << 8;
        if (format != 4) {
            at += 4;
            continue;
        }
        if (at + 4 + length > size)
            return;
        if (attribute == INFO_REGISTERS && length >= 8) {
            uint32_t pair[2];
            memcpy(pair, info + at + 4, sizeof pair);
            for (size_t i = 0; pair[0] < symbol_count && i < library->count; i++)
                if (!strcmp(library->kernels[i].name, strings + symbols[pair[0]].st_name))
                    library->kernels[i].registers = (int)pair[1];
        }
        at += 4 + length;
    }
}

static bool inside(size_t size, size_t offset, size_t length)
{
    return offset <= size && length <= size - offset;
}

static CUresult read_elf(struct library *library, const unsigned char *image, size_t size)
{
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
    if (size < sizeof *header || header->e_machine != EM_NVIDIA ||
        !inside(size, header->e_shoff, (size_t)header->e_shnum * sizeof(Elf64_Shdr)))
        return CUDA_ERROR_INVALID_IMAGE;
    /* In the present ABI (version 8) the second byte of the flags is the SM's number. */
    int architecture = (int)(header->e_flags >> 8 & 0xff);
    const struct si_pose *pose = si_pose();
    if (header->e_ident[EI_ABIVERSION] >= 8 &&
        (architecture / 10 != pose->major || architecture % 10 > pose->minor)) {
        si_trace("a cubin for sm_%d on sm_%d%d", architecture, pose->major, pose->minor);
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
    const Elf64_Shdr *table = NULL;
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_NOBITS &&
            !inside(size, sections[i].sh_offset, sections[i].sh_size))
            return CUDA_ERROR_INVALID_IMAGE;
        if (sections[i].sh_type == SHT_SYMTAB)
            table = &sections[i];
    }
    if (table == NULL || header->e_shstrndx >= header->e_shnum || table->sh_link >= header->e_shnum)
        return CUDA_ERROR_INVALID_IMAGE;
    const Elf64_Sym *symbols = (const Elf64_Sym *)(image + table->sh_offset);
    size_t count = table->sh_size / sizeof *symbols;
    const Elf64_Shdr *string_section = &sections[table->sh_link];
    library->names = malloc(string_section->sh_size + 1);
    library->kernels = calloc(count + 1, sizeof *library->kernels);
    library->globals = calloc(count + 1, sizeof *library->globals);
    if (!library->names || !library->kernels || !library->globals)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(library->names, image + string_section->sh_offset, string_section->sh_size);
    library->names[string_section->sh_size] = '\0';
    const char *section_names = (const char *)image + sections[header->e_shstrndx].sh_offset;
    for (size_t i = 0; i < count; i++) {
        const Elf64_Sym *symbol = &symbols[i];
        char *name = library->names + symbol->st_name;
        if (ELF64_ST_TYPE(symbol->st_info) == STT_FUNC && (symbol->st_other & STO_ENTRY))
            fill(&library->kernels[library->count++], name, library);
        if (ELF64_ST_TYPE(symbol->st_info) == STT_OBJECT && symbol->st_shndx != SHN_UNDEF &&
            ELF64_ST_BIND(symbol->st_info) == STB_GLOBAL && symbol->st_size)
            library->globals[library->global_count++] =
                (struct global){name, NULL, symbol->st_size};
    }
    for (int i = 0; i < header->e_shnum; i++)
        if (!strcmp(section_names + sections[i].sh_name, ".nv.info"))
            read_registers(library, image + sections[i].sh_offset, sections[i].sh_size, symbols,
                           count, library->names);
    for (size_t k = 0; k < library->count; k++) {
        struct si_kernel *kernel = &library->kernels[k];
        kernel->max_threads = threads_for(kernel->registers);
        for (int i = 0; i < header->e_shnum; i++) {
            const char *section = section_names + sections[i].sh_name;
            if (!strncmp(section, ".nv.info.", 9) && !strcmp(section + 9, kernel->name))
                read_info(kernel, image + sections[i].sh_offset, sections[i].sh_size);
            if (!strncmp(section, ".nv.shared.", 11) && !strcmp(section + 11, kernel->name))
                kernel->static_shared = static_shared((int)sections[i].sh_size);
        }
    }
    return CUDA_SUCCESS;
}

static size_t elf_size(const unsigned char *image)
{
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
    size_t end = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    size_t programs = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
    for (int i = 0; i < header->e_shnum; i++)
        if (sections[i].sh_type != SHT_NOBITS && sections[i].sh_offset + sections[i].sh_size > end)
            end = sections[i].sh_offset + sections[i].sh_size;
    return programs > end ? programs : end;
}

static bool packed(const unsigned char *image)
{
    static const unsigned char container[4] = {0x50, 0xed, 0x55, 0xba};
    static const unsigned char wrapper[4] = {0xb1, 0x43, 0x62, 0x46};
    return !memcmp(image, container, 4) || !memcmp(image, wrapper, 4);
}

static CUresult load(struct library **out, const void *data, size_t size)
{
    const unsigned char *image = data;
    if (si_pose() == NULL)
        return CUDA_ERROR_NO_DEVICE;
    if (image == NULL || out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct library *library = calloc(1, sizeof *library);
    if (library == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = CUDA_ERROR_INVALID_IMAGE;
    if (!memcmp(image, ELFMAG, SELFMAG)) {
        result = read_elf(library, image, size ? size : elf_size(image));
    } else if (packed(image) || strstr((const char *)image, ".version")) {
        library->open_names = true;
        result = CUDA_SUCCESS;
    }
    if (result != CUDA_SUCCESS) {
        si_trace("image refused: %d", result);
        free(library->kernels);
        free(library->names);
        free(library->globals);
        free(library);
        return result;
    }
    *out = library;
    return CUDA_SUCCESS;
}

static CUresult load_file(struct library **out, const char *path)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return CUDA_ERROR_FILE_NOT_FOUND;
    struct stat facts;
    CUresult result = CUDA_ERROR_INVALID_IMAGE;
    unsigned char *image = NULL;
    if (fstat(file, &facts) == 0 && facts.st_size > (off_t)sizeof(Elf64_Ehdr) &&
        (image = malloc((size_t)facts.st_size + 1)) != NULL &&
        read(file, image, (size_t)facts.st_size) == facts.st_size) {
        image[facts.st_size] = '\0';
        result = load(out, image, (size_t)facts.st_size);
    }
    free(image);
    close(file);
    if (result != CUDA_SUCCESS)
        si_trace("%s refused: %d", path, result);
    return result;
}

static void unload(struct library *library)
{
    /* Kernel handles may still be held by callers that cache them: keep the kernels. */
    (void)library;
}

static CUresult find_kernel(struct library *library, const char *name, struct si_kernel **out)
{
    for (size_t i = 0; i < library->count; i++)
        if (!strcmp(library->kernels[i].name, name)) {
            *out = &library->kernels[i];
            return CUDA_SUCCESS;
        }
    if (!library->open_names)
        return CUDA_ERROR_NOT_FOUND;
    struct si_kernel *kernel = calloc(1, sizeof *kernel);
    if (kernel == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fill(kernel, strdup(name), library);
    *out = kernel;
    return CUDA_SUCCESS;
}

static CUresult find_global(struct library *library, const char *name, CUdeviceptr *address,
                            size_t *size)
{
    for (size_t i = 0; i < library->global_count; i++) {
        struct global *global = &library->globals[i];
        if (strcmp(global->name, name))
            continue;
        pthread_mutex_lock(&lock);
        CUresult result = CUDA_SUCCESS;
        if (global->address == NULL)
            result = si_alloc(SI_DEVICE, si_current_device(), global->size, 0, &global->address);
        pthread_mutex_unlock(&lock);
        if (address)
            *address = (CUdeviceptr)global->address;
        if (size)
            *size = global->size;
        return result;
    }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuModuleLoad(CUmodule *module, const char *path)
{
    return load_file((struct library **)module, path);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    return load((struct library **)module, image, 0);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count,
                            CUjit_option *options, void **values)
{
    (void)count, (void)options, (void)values;
    return load((struct library **)module, image, 0);
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
    return load((struct library **)module, image, 0);
}

CUresult cuModuleUnload(CUmodule module)
{
    unload((struct library *)module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    return find_kernel((struct library *)module, name, (struct si_kernel **)function);
}

CUresult cuModuleGetFunctionCount(unsigned int *count, CUmodule module)
{
    *count = (unsigned)((struct library *)module)->count;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *size, CUmodule module, const char *name)
{
    return find_global((struct library *)module, name, address, size);
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
    *mode = CU_MODULE_LAZY_LOADING;
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *options,
                           void **values, unsigned int count, CUlibraryOption *library_options,
                           void **library_values, unsigned int library_count)
{
    (void)options, (void)values, (void)count;
    (void)library_options, (void)library_values, (void)library_count;
    return load((struct library **)library, image, 0);
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *options,
                               void **values, unsigned int count,
                               CUlibraryOption *library_options, void **library_values,
                               unsigned int library_count)
{
    (void)options, (void)values, (void)count;
    (void)library_options, (void)library_values, (void)library_count;
    return load_file((struct library **)library, path);
}

CUresult cuLibraryUnload(CUlibrary library)
{
    unload((struct library *)library);
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    return find_kernel((struct library *)library, name, (struct si_kernel **)kernel);
}

CUresult cuLibraryGetKernelCount(unsigned int *count, CUlibrary library)
{
    *count = (unsigned)((struct library *)library)->count;
    return CUDA_SUCCESS;
}

CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int count, CUlibrary handle)
{
    struct library *library = (struct library *)handle;
    for (unsigned i = 0; i < count && i < library->count; i++)
        kernels[i] = (CUkernel)&library->kernels[i];
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    *module = (CUmodule)library;
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *size, CUlibrary library, const char *name)
{
    return find_global((struct library *)library, name, address, size);
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetLibrary(CUlibrary *library, CUkernel kernel)
{
    *library = ((struct si_kernel *)kernel)->library;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetName(const char **name, CUkernel kernel)
{
    *name = ((struct si_kernel *)kernel)->name;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char **name, CUfunction function)
{
    *name = ((struct si_kernel *)function)->name;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetModule(CUmodule *module, CUfunction function)
{
    *module = ((struct si_kernel *)function)->library;
    return CUDA_SUCCESS;
}
